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


class ReadWeights:
    """Read tensor by tensor each time: from their file, or from where the modules hold them in host memory."""

    def __init__(self, layout: Layout, read: Read) -> None:
        self.layout, self._read = layout, read

    def fill(self, buffer: torch.Tensor) -> None:
        """Read them into a buffer of bytes on the device."""
        for view, tensor in zip(self.layout.views(buffer), self._read(), strict=True):
            view.copy_(tensor)


class PinnedWeights:
    """In host memory in one pinned piece, which a GPU copies by itself."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._piece = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
        for view, each in zip(layout.views(self._piece), layout.held, strict=True):
            view.copy_(each.tensor)

    def fill(self, buffer: torch.Tensor) -> None:
        """Copy them into a buffer of bytes on the device."""
        buffer[: self.layout.nbytes].copy_(self._piece, non_blocking=True)


def host_weights(layout: Layout, *, pinned: bool) -> BlockWeights:
    """Weights in host memory: pinned for a GPU, else where the modules hold them now, which for a tensor that is used as its
    file has it is the file itself, whose pages all ranks share.
    """
    if pinned:
        return PinnedWeights(layout)
    tensors = [each.tensor.detach() for each in layout.held]
    return ReadWeights(layout, lambda: iter(tensors))
