"""A Brownian motion with the numbers of torchsde's `BrownianTree`, from which ComfyUI draws the noise of its SDE samplers.

torchsde (Li et al. 2020, arXiv:2001.01328, section 4) halves the interval until it meets the ends of a query, and draws
for each part it asks for. Here both halves come of one draw, which makes a query more than twice as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from numpy.random import SeedSequence

DIGITS = 6
"""Places of the tree lie on a grid of millionths."""
POOL_SIZE = 24
"""Of numpy's seed sequences; torchsde's choice for its trees."""


@dataclass(frozen=True)
class Part:
    """An interval of the tree, and how far the motion goes in it. `place` counts those of one depth from the left."""

    start: float
    end: float
    increment: torch.Tensor
    place: int = 0
    depth: int = 0


class BrownianMotion:
    """The motion from `start` to `end` of a seed, of the shape, dtype and device of `like`."""

    def __init__(self, start: float, end: float, *, like: torch.Tensor, seed: int) -> None:
        self._start, self._end, self._like, self._seed = start, end, like, seed
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def increment(self, low: float, high: float) -> torch.Tensor:
        """How far it goes from `low` to `high`; outside of its interval it stands still."""
        low, high = (_on_grid(min(max(at, self._whole.start), self._whole.end)) for at in (low, high))
        before, self._kept = self._kept, {}
        parts = self._parts(self._whole, low, high, before)
        first = next(parts, None)
        total = torch.zeros_like(self._like) if first is None else first.clone()  # a part may be asked for again
        for part in parts:
            total += part
        return total

    @cached_property
    def _whole(self) -> Part:
        """All of the interval; drawn by the first query, so by the thread that asks."""
        increment = self._draw().mul_(math.sqrt(self._end - self._start))
        return Part(_on_grid(self._start), _on_grid(self._end), increment)

    def _parts(self, part: Part, low: float, high: float, before: dict) -> Iterator[torch.Tensor]:
        """What makes up the increment of a query, from left to right. `before`: what the query before it kept."""
        if (low, high) == (part.start, part.end):
            yield part.increment
            return
        middle, key = _on_grid(0.5 * (part.end + part.start)), (part.place, part.depth)
        left = self._kept[key] = before[key] if key in before else self._left_increment(part, middle)
        place, depth = 2 * part.place, part.depth + 1
        if low < middle:
            yield from self._parts(Part(part.start, middle, left, place, depth), low, min(high, middle), before)
        if high > middle:
            right = Part(middle, part.end, part.increment - left, place + 1, depth)
            yield from self._parts(right, max(low, middle), high, before)

    def _left_increment(self, part: Part, middle: float) -> torch.Tensor:
        """Of the left half: on the straight line through the part, but for a draw of its own."""
        before, after, share = middle - part.start, part.end - middle, 1 / (part.end - part.start)
        noise = self._draw(part.place, part.depth)
        straight = (before * part.increment).mul_(share)
        return noise.mul_(math.sqrt(before * after * share)).add_(straight)

    def _draw(self, *spawn_key: int) -> torch.Tensor:
        words = SeedSequence(self._seed, spawn_key=spawn_key, pool_size=POOL_SIZE).generate_state(1)
        generator = torch.Generator(self._like.device).manual_seed(int(words[0]))
        return torch.randn(self._like.shape, dtype=self._like.dtype, device=self._like.device, generator=generator)


def _on_grid(at: float) -> float:
    return round(at, DIGITS)
