"""A weight as it is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.shares import Cut
from ..stored import Stored
from .core import Core


class PlainCore(Core):
    """The matrix of a Linear, or the part of it that a rank holds: `(out, in)`."""

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__(linear, cut, stored)
        self.weight = nn.Parameter(cut.take(linear.weight), requires_grad=False)

    def matrix(self) -> torch.Tensor:
        """The matrix in float32."""
        return self.weight.float()

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        return F.linear(x, self.weight, bias)
