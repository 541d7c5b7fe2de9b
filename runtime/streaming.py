"""Layerwise offload of a transformer: which blocks are streamed, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from .blocks import BlockRunner
from .checkpoint import Shapes
from .free_memory import free_bytes
from .holding import Streamed, held_dtype
from .inspection import ModelFacts
from .linear import LocalPart, local_part, parallel_linear
from .mesh import Mesh
from .offload.choice import streamed_blocks
from .offload.gathered import GatheredWeights, is_faster
from .offload.layout import Held, Layout
from .offload.parts import MemoryPart, stored_part
from .offload.pinned import PieceWeights, PinnedMemory
from .offload.tensor_file import TensorFile
from .offload.weights import BlockWeights, ReadWeights, StagedWeights, Staging
from .quant.core import Core
from .reading import check_shape, opener
from .settings import AUTO, MemorySettings, amount_of

BIAS = "bias"


def choose_streamed(
    transformer: nn.Module,
    facts: ModelFacts,
    memory: MemorySettings,
    *,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> Streamed:
    """What to stream, of a transformer that has no weights yet: every Linear of those blocks becomes a `ParallelLinear`."""
    blocks = streamed_blocks(transformer, facts.spec.blocks, memory, dtype=dtype, free=partial(_free_everywhere, mesh))
    for block in blocks:
        _hold_linears(transformer.get_submodule(block))
    ordered = [name for source in facts.sources for name in source.names] or list(shapes)
    names = {block: tuple(name for name in ordered if _is_streamed(transformer, block, name)) for block in blocks}
    return Streamed(names, from_file=memory.offload == "disk")


def _free_everywhere(mesh: Mesh) -> int:
    """Bytes that every rank has free, so that all stream the same blocks; ranks on the processor share its memory."""
    return mesh.least(free_bytes(mesh.device) // (mesh.world if mesh.device.type == "cpu" else 1))


def _hold_linears(block: nn.Module) -> None:
    for name in [path for path, module in block.named_modules() if type(module) is nn.Linear]:
        parallel_linear(block, name)


def _is_streamed(transformer: nn.Module, block: str, name: str) -> bool:
    part = local_part(transformer, name) if name.startswith(f"{block}.") else None
    return part is not None and isinstance(part.module, Core) and not part.leaf.startswith(BIAS)


def stream_weights(
    transformer: nn.Module,
    facts: ModelFacts,
    streamed: Streamed,
    memory: MemorySettings,
    *,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> BlockRunner | None:
    """Have the weights of the streamed blocks come in before each runs, and go out after it; None where none are streamed."""
    modules = {transformer.get_submodule(block): names for block, names in streamed.blocks.items()}
    if not modules:
        return None
    if streamed.from_file:
        files = {source.path: opener(source, mapped=False)(source.path) for source in facts.sources}
        options = {"shapes": shapes, "dtype": dtype}
        read = {module: _file_weights(transformer, facts, names, files, **options) for module, names in modules.items()}
        weights = read if device.type == "cpu" else _staged(read, device)
    else:
        weights = _host_weights({module: Layout(Held.all_of(module)) for module in modules}, device)
    weights = _fetched(weights, memory.fetch, mesh)
    prefetch = amount_of(memory.prefetch, len(weights))
    return BlockRunner(weights, prefetch=prefetch, device=device, others_wait=mesh.world > 1)


def _fetched(weights: Mapping[nn.Module, BlockWeights], fetch: str, mesh: Mesh) -> Mapping[nn.Module, BlockWeights]:
    """Weights as they are, or gathered by the ranks that share the tokens, whichever is faster or wanted."""
    may_gain = fetch == "gather" or (fetch == AUTO and mesh.device.type == "cuda")
    group = mesh.own_group("ring", "ulysses") if may_gain else None
    if group is None:
        return weights
    gathered = {module: GatheredWeights(each, group) for module, each in weights.items()}
    first = next(iter(weights))
    if fetch == "gather" or is_faster(gathered[first], weights[first], group, device=mesh.device):
        return gathered
    return weights


def _host_weights(layouts: Mapping[nn.Module, Layout], device: torch.device) -> Mapping[nn.Module, BlockWeights]:
    """Where the modules hold them now: for a GPU in pinned memory, else the pages of the file too."""
    if device.type == "cuda":
        memory = PinnedMemory(each.tensor for layout in layouts.values() for each in layout.held)
        return {module: PieceWeights(layout, memory) for module, layout in layouts.items()}
    return {
        module: ReadWeights(layout, [MemoryPart(each.tensor.detach()) for each in layout.held])
        for module, layout in layouts.items()
    }


def _staged(read: Mapping[nn.Module, ReadWeights], device: torch.device) -> Mapping[nn.Module, BlockWeights]:
    staging = Staging(max(each.layout.nbytes for each in read.values()), device=device)
    return {module: StagedWeights(weights, staging) for module, weights in read.items()}


def _file_weights(
    transformer: nn.Module,
    facts: ModelFacts,
    names: Sequence[str],
    files: Mapping[Path, TensorFile],
    *,
    shapes: Shapes,
    dtype: torch.dtype,
) -> ReadWeights:
    """This rank's part of these tensors, to be read from the file each time."""
    held, parts = [], []
    for name in names:
        source = next(source for source in facts.sources if name in source.names)
        stored, part = files[source.path].get_slice(source.names[name]), local_part(transformer, name)
        check_shape(stored, name, shapes=shapes, source=source, facts=facts)
        each = _held(part, name, facts, dtype)
        held.append(each)
        parts.append(stored_part(stored, source.rows.get(name, ()), part.cut, shape=each.shape, dtype=each.dtype))
    return ReadWeights(Layout(held), parts)


def _held(part: LocalPart, name: str, facts: ModelFacts, dtype: torch.dtype) -> Held:
    parameter = part.module.get_parameter(part.leaf)
    return Held(part.module, part.leaf, parameter.shape, held_dtype(name, parameter, facts, dtype) or parameter.dtype)
