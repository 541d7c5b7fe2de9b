"""How many bytes of weights a rank holds: plain arithmetic on shapes, without torch and without reading a weight."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from .inspection import ModelFacts
from .settings import AUTO, MemorySettings, amount_of
from .stored import AWQ_INT4, BLOCKS, FP8, FP8_E5M2, GROUPS, SVDQUANT_NVFP4

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOAT32_BYTES = 4
AWQ_GROUP = 64
LOW_RANK = 32
"""The rank beside a weight that is rounded to 4 bits as it is loaded."""
ON_DEVICE = MemorySettings()
SPARE = 0.7
"""So much of the free memory may hold weights; the rest is for what a step works with."""
FORMATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""What headers of files call them."""


@dataclass(frozen=True)
class Held:
    """Bytes of a rank's weights: that are `staying` on its device, `streamed` to it from host memory, and of the `slots` that
    those come into. `mapped`: so much of the first two a rank on the processor uses where the file has it, in pages that all
    ranks share and that the system takes back when memory is short.
    """

    staying: int = 0
    streamed: int = 0
    slots: int = 0
    mapped: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def on_gpu(self) -> int:
        """What is in the memory of a GPU."""
        return self.staying + self.slots

    @property
    def on_host(self) -> int:
        """What a rank on the processor has."""
        return self.staying + self.streamed + self.slots

    @property
    def made(self) -> int:
        """Of that, what was made in host memory: once for the ranks that hold the same."""
        return self.staying + self.streamed - self.mapped


class _Tensor(NamedTuple):
    """The bytes that a rank has of a tensor of a block; whether it is streamed with that, and is used where the file has it."""

    block: str
    nbytes: int
    is_matrix: bool
    is_mapped: bool


def held_by_rank(
    facts: ModelFacts, *, dtype: str, tensor: int, offload: MemorySettings = ON_DEVICE, free: int = 0
) -> Held:
    """What the transformer takes of the rank that holds most, of `tensor` that share it; nothing where no shapes are known.

    Layers that the family does not cut are whole on every rank, and some stay in float32. Where it is left to the memory
    that is `free` for a rank which blocks are resident, 0 gives the least.
    """
    tensors = _tensors(facts, dtype, tensor, offload)
    blocks = _streamed(tensors, facts.spec.blocks, offload, free=free)
    comes = [[each for each in tensors if each.block == block and each.is_matrix] for block in blocks]
    staying = [each for each in tensors if each.block not in blocks or not each.is_matrix]
    copies = [] if offload.offload == "disk" else [each for block in comes for each in block]
    slots = min(amount_of(offload.prefetch, len(blocks)), len(blocks) - 1) + 1
    return Held(
        staying=_sum(staying),
        streamed=_sum(copies),
        slots=slots * max(map(_sum, comes), default=0),
        mapped=_sum(each for each in (*staying, *copies) if each.is_mapped),
    )


def streamed_blocks(
    facts: ModelFacts, *, dtype: str, tensor: int, offload: MemorySettings, free: int = 0
) -> frozenset[str]:
    """The blocks whose matrices come in for each run, by name; arguments as of `held_by_rank`."""
    return _streamed(_tensors(facts, dtype, tensor, offload), facts.spec.blocks, offload, free=free)


def bytes_per_rank(facts: ModelFacts, *, dtype: str, tensor: int, offload: MemorySettings = ON_DEVICE) -> int:
    """What of it is in the memory of a GPU, at least."""
    return held_by_rank(facts, dtype=dtype, tensor=tensor, offload=offload).on_gpu


def resident_blocks(
    memory: MemorySettings, sizes: Sequence[int], *, rest: int, free: Callable[[], int]
) -> frozenset[int]:
    """The numbers of the blocks of these bytes that stay on the device, evenly spread, so that each gives those beside it
    time to come in. `free` is asked for the bytes that are free for weights and `rest`, where they decide.
    """
    total = len(sizes)
    if not total:
        return frozenset()
    if memory.resident_blocks == AUTO:
        slots = amount_of(memory.prefetch, total) + 1
        count = max(0, min(total, int((SPARE * free() - rest) / max(sizes))))
        count = count if count == total else max(0, count - slots)
    else:
        count = amount_of(memory.resident_blocks, total)
    return frozenset(number * total // count for number in range(count))


def _streamed(
    tensors: Sequence[_Tensor], lists: Sequence[str], offload: MemorySettings, *, free: int
) -> frozenset[str]:
    """The blocks whose matrices come in for each run."""
    if offload.offload == "none":
        return frozenset()
    sizes: dict[str, int] = {}
    for each in tensors:
        sizes[each.block] = sizes.get(each.block, 0) + each.nbytes
    rest = sizes.pop("", 0)
    order = sorted(sizes, key=lambda block: (lists.index(block.rpartition(".")[0]), int(block.rpartition(".")[2])))
    resident = resident_blocks(offload, [sizes[block] for block in order], rest=rest, free=lambda: free)
    return frozenset(block for number, block in enumerate(order) if number not in resident)


def _sum(tensors: Iterable[_Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _tensors(facts: ModelFacts, dtype: str, degree: int, offload: MemorySettings) -> list[_Tensor]:
    return [_tensor(facts, name, shape, dtype, degree, offload) for name, shape in facts.shapes.items()]


def _tensor(
    facts: ModelFacts, name: str, shape: tuple[int, ...], dtype: str, degree: int, offload: MemorySettings
) -> _Tensor:
    nbytes = round(_bytes_held(facts, name, shape, dtype, degree))
    whole = _elements_held(facts, name, shape, degree) == math.prod(shape)
    mapped = whole and offload.offload != "disk" and _is_used_as_stored(facts, name, dtype)
    is_matrix = name.endswith(".weight") and len(shape) == 2
    return _Tensor(facts.spec.block_of(name), nbytes, is_matrix=is_matrix, is_mapped=mapped)


def _is_used_as_stored(facts: ModelFacts, name: str, dtype: str) -> bool:
    """Whether a file has a tensor in the number format in which it is held; taken to be so where that is not known."""
    if not facts.sources:
        return False
    stored = facts.stored.get(name.removesuffix(".weight"))
    if stored is not None and name.endswith(".weight"):
        return bool(stored.shapes)
    wanted = FORMATS["fp32" if facts.spec.stays_float32(name) else dtype]
    return facts.formats.get(name, wanted) == wanted


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
    rank = stored.shapes["proj_down"][1] if "proj_down" in stored.shapes else LOW_RANK
    return elements * (0.5 + scale) + rank * sum(shape) * plain


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


def local_shape(facts: ModelFacts, name: str, degree: int) -> tuple[float, float]:
    """The output and the input features of a Linear on the rank that has most of it."""
    out, into = shape = facts.shapes[f"{name}.weight"]
    part = _elements_held(facts, f"{name}.weight", shape, degree) / math.prod(shape)
    return (out, into * part) if shard_mode(facts, name) == "row" else (out * part, into)


def shard_mode(facts: ModelFacts, name: str) -> str:
    """How a Linear is cut over the tensor axis."""
    return next((shard.mode for shard in facts.spec.tensor.linears if re.fullmatch(shard.pattern, name)), "whole")


def _cut(shape: tuple[int, ...], dim: int, degree: int, *, blocks: tuple[int, ...] = (1,), grain: int) -> int:
    """Numbers in the largest share of a tensor that is dealt along `dim`, block by block, in grains where they fit."""
    unit, share = shape[dim] // sum(blocks), 0
    for size in (block * unit for block in blocks):
        step = 1 if size % grain else grain
        share += -(-size // step // degree) * step
    return math.prod(shape) // shape[dim] * share
