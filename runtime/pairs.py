"""Low-rank pairs beside a weight: what LoRAs add to it without touching it (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Pair(NamedTuple):
    """What a LoRA adds to a weight, `scale * up @ down`: this rank's part of `(rank, in)` and `(out, rank)`."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        return self.down.nbytes + self.up.nbytes


class Run(NamedTuple):
    """Some pairs that lie beside each other: `(ranks, in)`, `(ranks, out)` and a number for each of the ranks."""

    down: torch.Tensor
    up: torch.Tensor
    scales: torch.Tensor


class JoinedPairs:
    """Pairs that lie in two matrices on the device, so that several cost two multiplications and write the output once.

    Those that are off lie there too, until another is put on that does not: on, off and another strength copy nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.pairs: tuple[Pair, ...] = ()
        self._device = device
        self._lying: list[Pair] = []
        self._runs: list[Run] = []

    @property
    def nbytes(self) -> int:
        """What lies on the device."""
        return sum(pair.nbytes for pair in self._lying)

    def put(self, pairs: Sequence[Pair]) -> None:
        """Add these to the weight from now on, and no others."""
        scales: dict[int, float] = {}
        for pair in pairs:
            scales[id(pair.down)] = scales.get(id(pair.down), 0.0) + pair.scale
        if not scales.keys() <= {id(pair.down) for pair in self._lying}:
            self._join(pairs)
        self.pairs, self._runs = tuple(pairs), list(self._running(scales))

    def add_to(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """Add to `(..., out)`, in place, what the pairs make of `(..., in)`."""
        for run in self._runs:
            hidden = F.linear(x, run.down) * run.scales
            output.view(-1, output.shape[-1]).addmm_(hidden.flatten(0, -2), run.up)

    def _join(self, pairs: Iterable[Pair]) -> None:
        """Have these lie there, and no others."""
        self._lying = list({id(pair.down): pair for pair in pairs}.values())
        self._down = torch.cat([pair.down for pair in self._lying]).to(self._device)
        self._up = torch.cat([pair.up.T for pair in self._lying]).to(self._device)

    def _running(self, scales: dict[int, float]) -> Iterable[Run]:
        """What lies together of those that have a scale."""
        ends, start = [], 0
        for pair in self._lying:
            ends.append((start, start := start + len(pair.down), scales.get(id(pair.down), 0.0)))
        for is_on, group in groupby(ends, key=lambda end: end[2] != 0.0):
            if is_on:
                own = list(group)
                numbers = [scale for first, last, scale in own for _ in range(first, last)]
                rows = slice(own[0][0], own[-1][1])
                held = torch.tensor(numbers, dtype=self._down.dtype, device=self._device)
                yield Run(self._down[rows], self._up[rows], held)
