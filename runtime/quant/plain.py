"""A weight as it is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PlainCore(nn.Module):
    """The matrix of a Linear, or the part of it that a rank holds: `(out, in)`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        return F.linear(x, self.weight, bias)
