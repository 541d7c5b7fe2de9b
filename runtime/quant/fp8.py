"""A weight in 8 bits, as files of ComfyUI and others store it: widened for each multiplication.

Formats: Micikevicius et al. 2022, arXiv:2209.05433. One number may scale all of a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.shares import WHOLE, Cut
from ..stored import WEIGHT_SCALE, Stored
from .core import Core


class Fp8Core(Core):
    """The matrix of a Linear, or this rank's part of it, `(out, in)`, in 8 bits from the file on.

    A weight that comes in another format is rounded to the nearest, without a scale, as ComfyUI's `fp8_e4m3fn` does it.
    """

    FORMAT = torch.float8_e4m3fn

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__(linear, cut, stored)
        part = cut.take(linear.weight)
        self.weight = nn.Parameter(torch.empty_like(part, dtype=self.FORMAT), requires_grad=False)
        scale = torch.empty(stored.shapes[WEIGHT_SCALE], device=part.device) if WEIGHT_SCALE in stored.shapes else None
        self.weight_scale = None if scale is None else nn.Parameter(scale, requires_grad=False)

    def part(self, leaf: str) -> Cut:
        """How much of a stored tensor this rank keeps: every one has the scale."""
        return WHOLE if leaf == WEIGHT_SCALE else super().part(leaf)

    def place(self, leaf: str, tensor: torch.Tensor) -> None:
        """Take this rank's part of the weight, or the scale."""
        super().place(leaf, tensor.to(self.FORMAT if leaf == "weight" else torch.float32))

    def matrix(self) -> torch.Tensor:
        """What the codes stand for."""
        return self.widened(torch.float32)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`, in the dtype of `x`."""
        return F.linear(x, self.widened(x.dtype), bias)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in a wider format: what the codes stand for, times the scale."""
        weight = self.weight.to(dtype)
        return weight if self.weight_scale is None else weight.mul_(self.weight_scale)


class Fp8E5M2Core(Fp8Core):
    """The same with 5 bits of exponent and 2 of mantissa."""

    FORMAT = torch.float8_e5m2


class WidenedFp8Core(Fp8Core):
    """An 8-bit weight of a layer that its model holds in float32: widened once, when it is loaded."""

    FORMAT = torch.float32

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, times the scale."""
        return (self.weight if self.weight_scale is None else self.weight * self.weight_scale).to(dtype)
