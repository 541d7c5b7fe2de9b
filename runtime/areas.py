"""Areas of a conditioning: plain arithmetic with the numbers of ComfyUI, without torch.

An area is a size and then an offset for each dim, `(F, H, W, Z, Y, X)` or `(H, W, Y, X)`, in latent pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

from .message import Conditioning

WHOLE = 1 << 31
"""Size of an area along a dim that it does not limit; cut to the latent where it is used."""

SMALLEST_BOUNDS = 8
"""Rows and columns of an area that follows from a mask, at least."""

MODEL_READS = (
    "embedding",
    "second_embedding",
    "pooled",
    "attention_mask",
    "guidance",
    "references",
    "reference_method",
    "concat_latent",
    "clip_vision",
    "clip_vision_last",
    "noise_levels",
    "frame_rate",
)
Area = tuple[int, ...]


def pair_areas(*branches: Sequence[Conditioning]) -> list[list[Conditioning]]:
    """The branches of guidance, where each area of one has an entry of its own in every other.

    The entry that is added reads what the smallest entry around the area reads, and counts where and when the area does.
    """
    paired = [list(branch) for branch in branches]
    for given, other in permutations(paired, 2):
        for conditioning in given:
            other += _counterpart(conditioning, other)
    return paired


def spans_of(area: Area, dims: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where an area starts and ends along each dim of a latent. Raises `ValueError` for one outside."""
    sizes, offsets = halves(in_dims(area, len(dims)))
    if any(offset >= size for offset, size in zip(offsets, dims, strict=True)):
        raise ValueError(
            f"the area of a conditioning begins at {offsets}, outside the latent of {tuple(dims)}: move the area, or make "
            f"the latent larger"
        )
    ends = [min(size, offset + own) for own, offset, size in zip(sizes, offsets, dims, strict=True)]
    if any(end == offset for end, offset in zip(ends, offsets, strict=True)):
        raise ValueError(
            f"the area of a conditioning has the size {sizes}: make it at least 1 latent pixel wide and high"
        )
    return tuple(zip(offsets, ends, strict=True))


def area_of_percent(percent: Sequence[float], dims: Sequence[int]) -> Area:
    """An area that is given in parts of a latent, in its pixels."""
    sizes, offsets = halves(percent)
    missing = len(dims) - len(sizes)
    sizes, offsets = (1.0,) * missing + sizes, (0.0,) * missing + offsets
    return (
        *(max(1, round(part * size)) for part, size in zip(sizes, dims, strict=True)),
        *(round(part * size) for part, size in zip(offsets, dims, strict=True)),
    )


def area_of_mask(spans: Sequence[tuple[int, int]], sizes: Sequence[int], dims: Sequence[int]) -> Area:
    """The area that follows from a mask of these sizes which holds something in these spans of its rows and columns.

    A pixel of the latent lies between two of the mask, and holds something where one of them does.
    """
    steps = [size / own for size, own in zip(sizes, dims[-2:], strict=True)]
    starts = [max(0, math.floor((start - 0.5) / step - 0.5) + 1) for (start, _), step in zip(spans, steps, strict=True)]
    ends = [math.ceil((end + 0.5) / step - 0.5) for (_, end), step in zip(spans, steps, strict=True)]
    lengths = [min(end, own) - start for start, end, own in zip(starts, ends, dims[-2:], strict=True)]
    if min(lengths) <= 0:
        return (SMALLEST_BOUNDS, SMALLEST_BOUNDS, 0, 0)
    return (*(max(SMALLEST_BOUNDS, length) for length in lengths), *starts)


def in_dims(area: Area, count: int) -> Area:
    """An area in more dims: whole along those it does not name, which come first."""
    sizes, offsets = halves(area)
    missing = count - len(sizes)
    return (WHOLE,) * missing + sizes + (0,) * missing + offsets


def halves(area: Sequence) -> tuple[tuple, tuple]:
    """The sizes and the offsets of an area."""
    half = len(area) // 2
    return tuple(area[:half]), tuple(area[half:])


def _counterpart(conditioning: Conditioning, others: Sequence[Conditioning]) -> list[Conditioning]:
    """What `others` lacks for the area of a conditioning: nothing, or one entry."""
    area = conditioning.area
    if area is None:
        return []
    around = [other for other in others if other.area is None or _holds(other.area, area)]
    with_area = [other for other in around if other.area is not None]
    if not around:
        return []
    read = min(with_area, key=lambda other: math.prod(halves(other.area)[0])) if with_area else around[0]
    if read.area == area:
        return []
    model_reads = {name: getattr(read, name) for name in MODEL_READS}
    return [conditioning.model_copy(update=model_reads)]


def _holds(outer: Area, inner: Area) -> bool:
    """Whether an area lies in another."""
    count = max(len(outer), len(inner)) // 2
    sizes, offsets = halves(in_dims(outer, count))
    own_sizes, own_offsets = halves(in_dims(inner, count))
    return all(
        start <= own_start and own_start + own <= start + size
        for start, size, own_start, own in zip(offsets, sizes, own_offsets, own_sizes, strict=True)
    )
