"""Layerwise offload of a transformer: which blocks are streamed, and from where."""

from __future__ import annotations

import torch
from torch import nn

from .blocks import BlockRunner
from .checkpoint import Shapes, Streamed, file_weights
from .errors import Refused
from .inspection import ModelFacts
from .linear import local_part, parallel_linear
from .offload.choice import streamed_blocks
from .offload.layout import Held, Layout
from .offload.weights import BlockWeights, HostWeights
from .quant.core import Core
from .settings import MemorySettings, amount_of


def choose_streamed(
    transformer: nn.Module,
    facts: ModelFacts,
    memory: MemorySettings,
    *,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
) -> Streamed:
    """What to stream, of a transformer that has no weights yet: every Linear of those blocks becomes a `ParallelLinear`.

    Raises `Refused` where the weights are in no file to stream from.
    """
    from_file = memory.offload == "disk"
    if from_file and not facts.sources:
        raise Refused(f"offload disk: {facts.name} has random weights, which are in no file: choose offload layerwise")
    blocks = streamed_blocks(transformer, facts.spec.blocks, memory, dtype=dtype, device=device)
    for block in blocks:
        _hold_linears(transformer.get_submodule(block))
    ordered = [name for source in facts.sources for name in source.names] or list(shapes)
    names = {block: tuple(name for name in ordered if _is_streamed(transformer, block, name)) for block in blocks}
    return Streamed(names, from_file=from_file)


def _hold_linears(block: nn.Module) -> None:
    for name in [path for path, module in block.named_modules() if type(module) is nn.Linear]:
        parallel_linear(block, name)


def _is_streamed(transformer: nn.Module, block: str, name: str) -> bool:
    part = local_part(transformer, name) if name.startswith(f"{block}.") else None
    return part is not None and isinstance(part.module, Core)


def stream_weights(
    transformer: nn.Module,
    facts: ModelFacts,
    streamed: Streamed,
    memory: MemorySettings,
    *,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Have the weights of the streamed blocks come in before each runs, and go out after it."""
    weights: dict[nn.Module, BlockWeights] = {}
    for block, names in streamed.blocks.items():
        module = transformer.get_submodule(block)
        if streamed.from_file:
            weights[module] = file_weights(transformer, facts, names, shapes=shapes, dtype=dtype)
        else:
            weights[module] = HostWeights(Layout(Held.all_of(module)), pinned=device.type == "cuda")
    if weights:
        BlockRunner(weights, prefetch=amount_of(memory.prefetch, len(weights)), device=device)
