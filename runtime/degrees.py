"""The degree of each axis of the mesh: plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from .settings import formula


@dataclass(frozen=True)
class Degrees:
    """The degree of each axis, outermost first."""

    data: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    @property
    def product(self) -> int:
        """How many ranks that is."""
        return math.prod(astuple(self))

    def degree(self, axis: str) -> int:
        """The degree of an axis by name."""
        return getattr(self, axis)

    @property
    def formula(self) -> str:
        """The axes that have more than one rank, such as "cfg 2 x ulysses 4"."""
        return formula({axis: degree for axis, degree in vars(self).items() if degree > 1}) or "one rank"


def factored(count: int, fixed: list[int]) -> Iterator[tuple[int, ...]]:
    """The ways to write `count` as a product of as many factors; a factor that is not 0 is given."""
    if not fixed:
        if count == 1:
            yield ()
        return
    first, *rest = fixed
    for size in [first] if first else range(1, count + 1):
        if count % size == 0:
            for others in factored(count // size, rest):
                yield (size, *others)
