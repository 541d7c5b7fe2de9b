"""What modules take of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Bytes:
    """Memory of a GPU, and of the host."""

    device: int = 0
    host: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)

    @classmethod
    def on(cls, device: torch.device, size: int) -> Bytes:
        """So much on a device, which may be the host."""
        return cls(device=size) if device.type == "cuda" else cls(host=size)


def weigh(modules: Iterable[nn.Module]) -> Bytes:
    """What parameters and buffers take; memory that several of them share counts once, and what is in no memory not at
    all. Tensors that are used as their file has them count as host memory, though it is the system's cache of the file.
    """
    tensors = [
        tensor for module in modules for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta
    ]
    storages = {(tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage() for tensor in tensors}
    return sum((Bytes.on(device, storage.nbytes()) for (device, _), storage in storages.items()), Bytes())
