"""What every core of a `ParallelLinear` is."""

from __future__ import annotations

import torch
from torch import nn

from ..parallel.shares import WHOLE, Cut
from ..stored import Stored


class Core(nn.Module):
    """One rank's part of a Linear, as a kind of file stores it.

    `cut` is the part of the weight `(out, in)`; `stored` says which tensors a file has for the whole of it. A kind
    answers for each of them how much this rank keeps (`part`), and takes them one by one (`place`). `own_bias`: it holds
    the bias itself.
    """

    own_bias = False

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__()
        self.cut, self.stored = cut, stored

    def holder(self, leaf: str) -> tuple[Core, str]:
        """The core that takes a stored tensor, which may be one of several in here, and what that one calls it."""
        return self, leaf

    def part(self, leaf: str) -> Cut | None:
        """How much of a stored tensor this rank keeps; None of one that is of no use. Of the bias, which `ParallelLinear`
        holds, as much as of the output.
        """
        return self.cut if leaf != "bias" or self.cut.dim == 0 else WHOLE

    def place(self, leaf: str, tensor: torch.Tensor) -> None:
        """Take this rank's part of a stored tensor."""
        self.load_state_dict({leaf: tensor}, strict=False, assign=True)

    def matrix(self) -> torch.Tensor:
        """This rank's part of the weight as numbers, `(out, in)` float32: what the stored tensors stand for."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`, either one of this rank's part."""
        raise NotImplementedError
