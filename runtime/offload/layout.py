"""The matrices of a block as one buffer of bytes, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..quant.core import Core

ALIGNMENT = 64
"""Where each tensor begins: no kernel asks for more."""


def aligned(nbytes: int) -> int:
    """So many bytes and those up to the next place where a tensor may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Held:
    """A matrix of a block: which core of a Linear has it under which name, and what it is like.

    Biases, norms and tables are small: they stay, and a LoRA may change them.
    """

    module: Core
    leaf: str
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def all_of(cls, block: nn.Module) -> list[Held]:
        """Every tensor of every core in a block, but for biases that a core has in a list."""
        return [
            cls(module, leaf, parameter.shape, parameter.dtype)
            for module in block.modules()
            if isinstance(module, Core)
            for leaf, parameter in module.named_parameters(recurse=False)
        ]

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def tensor(self) -> torch.Tensor:
        """What the module has there now."""
        return getattr(self.module, self.leaf)

    def put(self, tensor: torch.Tensor) -> None:
        """Have the module use a tensor there."""
        setattr(self.module, self.leaf, nn.Parameter(tensor, requires_grad=False))


class Layout:
    """Where each of some tensors lies in a buffer of `nbytes`."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.held, self.spans, self.nbytes = tuple(held), [], 0
        for each in held:
            self.spans.append(slice(self.nbytes, self.nbytes + each.nbytes))
            self.nbytes += aligned(each.nbytes)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer of bytes."""
        return [
            buffer[span].view(each.dtype).view(each.shape) for span, each in zip(self.spans, self.held, strict=True)
        ]

    def put(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the modules use these tensors."""
        for each, tensor in zip(self.held, tensors, strict=True):
            each.put(tensor)
