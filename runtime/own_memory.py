"""Large tensors on the processor in memory of their own, all of which goes back to the system with the tensor.

What lies in the C library's heap may stay there when it is freed: between what is still used, or at the end of a part of the
heap that a thread had ("Memory Allocation Tunables" in glibc's manual: the thresholds grow to 64 MB for each thread).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

LARGE_BYTES = 1 << 20
"""From here on: smaller ones find a place in the heap that is free again."""
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is to be filled. Raises `OSError` where memory is short."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes, **PRIVATE), dtype=dtype).view(shape)


def held(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in this format, None for its own: itself where it has it and lies in no heap (in a file, or in such memory)."""
    dtype = dtype or tensor.dtype
    if tensor.device.type == "cpu" and tensor.dtype == dtype and not tensor.untyped_storage().resizable():
        return tensor
    return empty(tensor.shape, dtype).copy_(tensor)


def joined(tensors: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor:
    """A copy of several that are on the processor, one after the other along a dim, in such memory."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return torch.cat(tensors, dim=dim, out=empty(shape, tensors[0].dtype))
