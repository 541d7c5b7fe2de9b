"""Who has how many of something that is dealt to the ranks of a group: plain arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Sequence


def even_lengths(total: int, degree: int) -> tuple[int, ...]:
    """How many of `total` each rank has; they differ by at most one."""
    return tuple(total // degree + (rank < total % degree) for rank in range(degree))


def grained_lengths(total: int, degree: int, grain: int) -> tuple[int, ...]:
    """Even lengths that are numbers of grains, where the total is one; they differ by at most a grain."""
    grain = 1 if total % grain else grain
    return tuple(grain * count for count in even_lengths(total // grain, degree))


def span(lengths: Sequence[int], rank: int) -> slice:
    """Where the part of a rank lies in the whole."""
    start = sum(lengths[:rank])
    return slice(start, start + lengths[rank])


def length_of(spans: Sequence[slice]) -> int:
    """How many there are in some spans."""
    return sum(span.stop - span.start for span in spans)
