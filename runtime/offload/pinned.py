"""Weights in host memory that a GPU copies by itself, in one piece for each block."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .layout import Layout
from .weights import BlockWeights


class PinnedMemory:
    """Memory of tensors, pinned for as long as this lives; it may be memory that other processes map and pin as well.

    Unlike what torch allocates pinned, it takes no more than there is. Raises `RuntimeError` where CUDA refuses.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        runtime = torch.cuda.cudart()
        for address, storage in self._storages.items():
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, storage.nbytes(), 0)))
        weakref.finalize(self, _unpin, tuple(self._storages))


def _unpin(addresses: Iterable[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


class PieceWeights(BlockWeights):
    """One piece of host memory, in which the tensors of a layout lie as it says; `memory` keeps it pinned."""

    def __init__(self, layout: Layout, memory: PinnedMemory | None = None) -> None:
        super().__init__(layout)
        self._memory = memory
        self._piece = piece_of(layout)

    def fill(self, buffer: torch.Tensor, start: int = 0) -> None:
        """Copy them into a buffer of bytes on the device."""
        piece = self._piece[start : start + len(buffer)]
        buffer[: len(piece)].copy_(piece, non_blocking=True)


def piece_of(layout: Layout) -> torch.Tensor:
    """The bytes where the tensors of a layout are, one after the other. Raises `RuntimeError` where they are not."""
    tensors = [each.tensor for each in layout.held]
    first = tensors[0].untyped_storage()
    base = tensors[0].data_ptr()
    if [tensor.data_ptr() - base for tensor in tensors] != [span.start for span in layout.spans]:
        raise RuntimeError("the weights of a block do not lie together in host memory")
    piece = torch.empty(0, dtype=torch.uint8)
    return piece.set_(first, base - first.data_ptr(), (layout.spans[-1].stop,))
