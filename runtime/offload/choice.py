"""Which blocks of a model have their weights streamed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..settings import AUTO, MemorySettings, amount_of

SPARE = 0.7
"""So much of the free memory may hold weights; the rest is for what a step works with."""


def streamed_blocks(
    model: nn.Module, lists: tuple[str, ...], memory: MemorySettings, *, dtype: torch.dtype, free: Callable[[], int]
) -> tuple[str, ...]:
    """The names of the streamed blocks of a model that has no weights yet, in the order in which they run; none without
    offload. The resident ones lie between them, evenly spread, so that each gives those beside it time to come in. `free`
    is asked for the bytes that are free, where they decide.
    """
    if memory.offload == "none":
        return ()
    names = [f"{blocks}.{number}" for blocks in lists for number in range(len(model.get_submodule(blocks)))]
    if memory.resident_blocks == AUTO:
        sizes = [_bytes_of(model.get_submodule(name), dtype) for name in names]
        slots = amount_of(memory.prefetch, len(names)) + 1
        left = SPARE * free() - (_bytes_of(model, dtype) - sum(sizes))
        count = max(0, min(len(names), int(left / max(sizes))))
        count = count if count == len(names) else max(0, count - slots)
    else:
        count = amount_of(memory.resident_blocks, len(names))
    resident = {number * len(names) // count for number in range(count)}
    return tuple(name for number, name in enumerate(names) if number not in resident)


def _bytes_of(module: nn.Module, dtype: torch.dtype) -> int:
    return sum(
        parameter.numel() * (dtype.itemsize if parameter.is_floating_point() else parameter.element_size())
        for parameter in module.parameters()
    )
