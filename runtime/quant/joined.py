"""A Linear that a file stores as several, one for each block of its inputs: the last of Flux's single blocks."""

from __future__ import annotations

import torch
from torch import nn

from ..parallel.shares import WHOLE, Cut
from ..stored import Stored
from .core import Core
from .kernels import four_bit_core


class JoinedCore(Core):
    """The sum of the cores of `stored.joined`, each over its own inputs; `qweight@0` is a tensor of the first."""

    own_bias = True

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__(linear, cut, stored)
        self.cores, self.biases, self._lengths = nn.ModuleList(), nn.ParameterList(), []
        for number, part in enumerate(stored.joined):
            start = sum(stored.inputs[:number])
            own = Cut(1, (_moved(cut.spans[number], start),)) if cut.spans else WHOLE
            piece = nn.Linear(stored.inputs[number], linear.out_features, device="meta", dtype=linear.weight.dtype)
            self.cores.append(four_bit_core(piece, own, part))
            self._lengths.append(own.spans[0].stop - own.spans[0].start if own.spans else stored.inputs[number])
            self.biases.append(nn.Parameter(linear.weight.new_empty(linear.out_features), requires_grad=False))

    @property
    def _has_bias(self) -> bool:
        """Of the ranks that share the inputs the first adds it."""
        return not self.cut.spans or self.cut.spans[0].start == 0

    def holder(self, leaf: str) -> tuple[Core, str]:
        own, _, number = leaf.partition("@")
        return (self, leaf) if own == "bias" else (self.cores[int(number)], own)

    def part(self, leaf: str) -> Cut:
        """How much of a bias this rank keeps, as the core that it belongs to says."""
        own, _, number = leaf.partition("@")
        return self.cores[int(number)].part(own)

    def place(self, leaf: str, tensor: torch.Tensor) -> None:
        """Take a bias."""
        self.biases[int(leaf.partition("@")[2])] = nn.Parameter(tensor, requires_grad=False)

    def matrix(self) -> torch.Tensor:
        """The matrices of the cores beside each other."""
        return torch.cat([core.matrix() for core in self.cores], dim=1)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        pieces = x.split(self._lengths, dim=-1)
        biases = self.biases if self._has_bias else [None] * len(self.cores)
        outputs = [core(piece, own) for core, piece, own in zip(self.cores, pieces, biases, strict=True)]
        return torch.stack(outputs).sum(0)


def _moved(span: slice, start: int) -> slice:
    return slice(span.start - start, span.stop - start)
