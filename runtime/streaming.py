"""Layerwise offload of a transformer: which blocks are streamed, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from .blocks import BlockRunner
from .checkpoint import Shapes, Streamed, held_dtype
from .errors import Refused
from .inspection import ModelFacts
from .linear import LocalPart, local_part, parallel_linear
from .offload.choice import streamed_blocks
from .offload.layout import Held, Layout
from .offload.parts import stored_part
from .offload.tensor_file import TensorFile
from .offload.weights import BlockWeights, ReadWeights, StagedWeights, Staging, host_weights
from .quant.core import Core
from .reading import check_shape, opener
from .settings import MemorySettings, amount_of

BIAS = "bias"


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
    for name in (name for listed in names.values() for name in listed if from_file):
        _held(local_part(transformer, name), name, facts, dtype)  # refused here, before a weight is read
    return Streamed(names, from_file=from_file)


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
) -> int:
    """Have the weights of the streamed blocks come in before each runs, and go out after it; the bytes of the slots that they
    come into.
    """
    weights: dict[nn.Module, BlockWeights] = {}
    files = {source.path: opener(source, mapped=False)(source.path) for source in facts.sources if streamed.from_file}
    for block, names in streamed.blocks.items():
        module = transformer.get_submodule(block)
        if streamed.from_file:
            weights[module] = _file_weights(transformer, facts, names, files, shapes=shapes, dtype=dtype)
        else:
            weights[module] = host_weights(Layout(Held.all_of(module)), pinned=device.type == "cuda")
    if weights and streamed.from_file and device.type == "cuda":
        staging = Staging(max(each.layout.nbytes for each in weights.values()), device=device)
        weights = {module: StagedWeights(each, staging) for module, each in weights.items()}
    if not weights:
        return 0
    return BlockRunner(weights, prefetch=amount_of(memory.prefetch, len(weights)), device=device).slot_bytes


def _file_weights(
    transformer: nn.Module,
    facts: ModelFacts,
    names: Sequence[str],
    files: Mapping[Path, TensorFile],
    *,
    shapes: Shapes,
    dtype: torch.dtype,
) -> ReadWeights:
    """This rank's part of these tensors, to be read from the file each time.

    Raises `Refused` where the file does not have them as they are used.
    """
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
    parameter = dict(part.module.named_parameters()).get(part.leaf)
    if parameter is None:
        raise Refused(
            f"offload disk reads the weights of {facts.name} as its file has them, but {name} is converted when it is "
            f"loaded: choose offload layerwise"
        )
    return Held(part.module, part.leaf, parameter.shape, held_dtype(name, parameter, facts, dtype) or parameter.dtype)
