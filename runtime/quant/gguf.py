"""A weight in the blocks of a GGUF file, turned into numbers for each multiplication."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.shares import Cut
from ..stored import BLOCKS, Stored
from .core import Core
from .gguf_blocks import dequantise


class GGUFCore(Core):
    """The rows of a Linear's matrix, or this rank's part of them, as bytes `(out, bytes)`; `stored.kind` is their format.

    Raises `ValueError` for a cut that goes through a block.
    """

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__(linear, cut, stored)
        self._block = BLOCKS[stored.kind]
        rows, features = cut.take(linear.weight).shape
        packed = torch.empty((rows, self._bytes(features)), dtype=torch.uint8, device=linear.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def part(self, leaf: str) -> Cut:
        """How much of a stored tensor this rank keeps, in bytes of a row for what is cut along the inputs."""
        part = super().part(leaf)
        if leaf != "weight" or part.dim == 0:
            return part
        return Cut(1, tuple(slice(self._bytes(span.start), self._bytes(span.stop)) for span in part.spans))

    def matrix(self) -> torch.Tensor:
        """What the blocks stand for."""
        return dequantise(self.weight, self.stored.kind)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`, in the dtype of `x`."""
        return F.linear(x, self.matrix().to(x.dtype), bias)

    def _bytes(self, features: int) -> int:
        blocks, rest = divmod(features, self._block.elements)
        if rest:
            raise ValueError(f"a cut at input {features} goes through a block of {self._block.elements}")
        return blocks * self._block.nbytes
