"""Which blocks of a model have their weights streamed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..footprint import resident_blocks
from ..settings import MemorySettings


def streamed_blocks(
    model: nn.Module, lists: tuple[str, ...], memory: MemorySettings, *, dtype: torch.dtype, free: Callable[[], int]
) -> tuple[str, ...]:
    """The names of the streamed blocks of a model that has no weights yet, in the order in which they run; none without
    offload. The resident ones lie between them, as `resident_blocks` says, which asks `free`.
    """
    if memory.offload == "none":
        return ()
    names = [f"{blocks}.{number}" for blocks in lists for number in range(len(model.get_submodule(blocks)))]
    sizes = [_bytes_of(model.get_submodule(name), dtype) for name in names]
    resident = resident_blocks(memory, sizes, rest=_bytes_of(model, dtype) - sum(sizes), free=free)
    return tuple(name for number, name in enumerate(names) if number not in resident)


def _bytes_of(module: nn.Module, dtype: torch.dtype) -> int:
    return sum(
        parameter.numel() * (dtype.itemsize if parameter.is_floating_point() else parameter.element_size())
        for parameter in module.parameters()
    )
