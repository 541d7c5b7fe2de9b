"""How one rank holds the tensors of a model: where, in which number format, and which of them it makes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from . import own_memory
from .facts import ModelFacts, Source
from .linear import LocalPart
from .offload.host_copy import Share
from .parallel.shares import WHOLE
from .stored import TENSOR_SCALE, WEIGHT_SCALE

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Streamed:
    """The tensors that come to the device for each run of their block: their names, by block. `from_file`: they are not
    held at all.
    """

    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    from_file: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all blocks."""
        return frozenset(name for names in self.blocks.values() for name in names)


@dataclass(frozen=True)
class Holding:
    """What is asked before a tensor is read. `dtype` is the one of a plain weight; `tables` are stored tensors that are no
    parameters, which each rank has for itself.
    """

    facts: ModelFacts
    dtype: torch.dtype
    device: torch.device
    streamed: Streamed
    share: Share
    tables: frozenset[str] = frozenset()

    @property
    def reads_in_threads(self) -> bool:
        """Not where ranks on the processor deal the work among them, or host memory is short: what threads of glibc have
        freed it keeps for them.
        """
        return self.device.type != "cpu" or not (self.streamed.from_file or self.share.group is not None)

    def place(self, name: str) -> torch.device:
        """Where a tensor goes."""
        return HOST if name in self.streamed.names else self.device

    def moved(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor where it goes, in the number format in which it is held."""
        if tensor is None:
            return None
        place, dtype = self.place(name), held_dtype(name, tensor, self.facts, self.dtype)
        return own_memory.held(tensor, dtype) if place == HOST else tensor.to(device=place, dtype=dtype)

    def is_made_here(self, name: str) -> bool:
        """Whether this rank has to make it: what is in host memory one rank makes for those that hold the same."""
        if self.streamed.from_file and name in self.streamed.names:
            return False
        return name in self.tables or self.place(name) != HOST or self.share.has(unit_of(name, self.facts))

    def stays_mapped(self, name: str, stored: Any, part: LocalPart, source: Source) -> bool:
        """Whether it is used where the file has it, whose pages all ranks share. A GPU copies from pinned memory instead."""
        parameter = dict(part.module.named_parameters(recurse=False)).get(part.leaf)
        if self.streamed.from_file or self.device.type == "cuda" or parameter is None or not parameter.shape:
            return False
        if part.cut != WHOLE or len(source.rows.get(name, ())) > 1 or source.widens(name):
            return False
        return stored[0:0].dtype == (held_dtype(name, parameter, self.facts, self.dtype) or parameter.dtype)


def unit_of(name: str, facts: ModelFacts) -> str:
    """What is made by one rank: all of a block, or the tensors of a layer outside of them."""
    return facts.spec.block_of(name) or name.rpartition(".")[0]


def held_dtype(name: str, tensor: torch.Tensor, facts: ModelFacts, dtype: torch.dtype) -> torch.dtype | None:
    """What a tensor is converted to; None for codes that another tensor scales, and for scales, which stay as they are."""
    layer, _, leaf = name.rpartition(".")
    coded = layer in facts.stored and leaf != "bias" and tensor.element_size() == 1
    if coded or leaf in (WEIGHT_SCALE, TENSOR_SCALE) or not tensor.is_floating_point():
        return None
    return torch.float32 if facts.spec.stays_float32(name) else dtype
