"""How many bytes of weights a rank holds: plain arithmetic on shapes, without torch and without reading a weight."""

from __future__ import annotations

import math
import re

from .inspection import ModelFacts
from .settings import AUTO, MemorySettings, amount_of
from .stored import AWQ_INT4, BLOCKS, FP8, FP8_E5M2, GROUPS, SVDQUANT_NVFP4

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOAT32_BYTES = 4
AWQ_GROUP = 64
LOW_RANK = 32
"""The rank beside a 4-bit weight, as good as always."""
ON_DEVICE = MemorySettings()


def bytes_per_rank(facts: ModelFacts, *, dtype: str, tensor: int, offload: MemorySettings = ON_DEVICE) -> int:
    """What the transformer takes on the device of the rank that holds most, of `tensor` that share it; 0 where no shapes
    are known.

    Layers that the family does not cut are whole on every rank, and some stay in float32. With offload, blocks take what
    the slots and the resident ones do; "auto" keeps a block resident only where there is room.
    """
    held: dict[str, int] = {}
    for name, shape in facts.shapes.items():
        block = facts.spec.block_of(name)
        held[block] = held.get(block, 0) + round(_bytes_held(facts, name, shape, dtype, tensor))
    if offload.offload == "none":
        return sum(held.values())
    rest, blocks = held.pop("", 0), len(held)
    resident = 0 if offload.resident_blocks == AUTO else amount_of(offload.resident_blocks, blocks)
    slots = min(amount_of(offload.prefetch, blocks) + 1, blocks - resident)
    return rest + (resident + slots) * max(held.values(), default=0)


def _bytes_held(facts: ModelFacts, name: str, shape: tuple[int, ...], dtype: str, tensor: int) -> float:
    elements, plain = _elements_held(facts, name, shape, tensor), DTYPE_BYTES[dtype]
    stored = facts.stored.get(name.removesuffix(".weight"))
    if stored is not None and stored.kind == AWQ_INT4:
        return elements * (0.5 + 2 * plain / AWQ_GROUP)
    if stored is not None and stored.kind in (FP8, FP8_E5M2):
        return elements
    if stored is not None and stored.kind in BLOCKS and name.endswith(".weight"):
        return elements * BLOCKS[stored.kind].nbytes / BLOCKS[stored.kind].elements
    if stored is None or stored.kind not in GROUPS:
        return elements * (FLOAT32_BYTES if facts.spec.stays_float32(name) else plain)
    scale = (1 if stored.kind == SVDQUANT_NVFP4 else plain) / GROUPS[stored.kind]
    return elements * (0.5 + scale) + LOW_RANK * sum(shape) * plain


def _elements_held(facts: ModelFacts, name: str, shape: tuple[int, ...], degree: int) -> int:
    """How many numbers of a tensor the first rank holds: it has the largest share of each, and the biases of rows."""
    if math.prod(shape) == 1:
        return 1
    module, _, leaf = name.rpartition(".")
    split = facts.spec.tensor
    for shard in split.linears:
        if re.fullmatch(shard.pattern, module):
            if shard.mode == "row" and leaf == "bias":
                return math.prod(shape)
            grain = shard.grain(facts.head_dim)
            return _cut(shape, 1 if shard.mode == "row" else 0, degree, blocks=shard.blocks, grain=grain)
    if split.norms and re.fullmatch(split.norms, module):
        return _cut(shape, 0, degree, grain=facts.head_dim)
    return math.prod(shape)


def _cut(shape: tuple[int, ...], dim: int, degree: int, *, blocks: tuple[int, ...] = (1,), grain: int) -> int:
    """Numbers in the largest share of a tensor that is dealt along `dim`, block by block, in grains where they fit."""
    unit, share = shape[dim] // sum(blocks), 0
    for size in (block * unit for block in blocks):
        step = 1 if size % grain else grain
        share += -(-size // step // degree) * step
    return math.prod(shape) // shape[dim] * share
