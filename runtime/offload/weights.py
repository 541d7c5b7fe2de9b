"""The weights of a block outside of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from .layout import Layout

Read = Callable[[], Iterator[torch.Tensor]]
"""The tensors of a layout, in its order, read anew."""


class BlockWeights(Protocol):
    """Where a block's weights lie while it does not run."""

    layout: Layout

    def fill(self, buffer: torch.Tensor) -> None:
        """Copy them into a buffer of bytes on the device, as the layout says."""


class HostWeights:
    """In host memory, as the modules hold them now: for a GPU pinned and in one piece, else where they are, which for a
    tensor that is used as its file has it is the file itself, whose pages all ranks share.
    """

    def __init__(self, layout: Layout, *, pinned: bool) -> None:
        self.layout = layout
        self._tensors = [each.tensor.detach() for each in layout.held]
        self._pinned = self._in_one_piece() if pinned else None
        if pinned:
            self._tensors = []

    def fill(self, buffer: torch.Tensor) -> None:
        """Copy them into a buffer of bytes on the device."""
        if self._pinned is not None:
            buffer[: self.layout.nbytes].copy_(self._pinned, non_blocking=True)
            return
        for view, tensor in zip(self.layout.views(buffer), self._tensors, strict=True):
            view.copy_(tensor)

    def _in_one_piece(self) -> torch.Tensor:
        piece = torch.empty(self.layout.nbytes, dtype=torch.uint8, pin_memory=True)
        for view, tensor in zip(self.layout.views(piece), self._tensors, strict=True):
            view.copy_(tensor)
        return piece


class FileWeights:
    """In their file, read each time: they take no host memory but the system's cache of the file."""

    def __init__(self, layout: Layout, read: Read) -> None:
        self.layout, self._read = layout, read

    def fill(self, buffer: torch.Tensor) -> None:
        """Read them into a buffer of bytes on the device."""
        for view, tensor in zip(self.layout.views(buffer), self._read(), strict=True):
            view.copy_(tensor)
