"""The tensors of a file by the names that the class of its family has for them, whatever the file calls them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from .families.spec import FamilySpec, Fused
from .safetensors_header import TensorEntry

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What ComfyUI puts before the transformer's names, in an all-in-one checkpoint or a file of its own."""
Rows = tuple[slice, ...]
"""Spans of a stored tensor's rows, in the order in which they make up another."""


@dataclass(frozen=True)
class Layout:
    """A transformer's tensors by the names of its class: what the file calls each, its shape and, where it is a part of what
    the file has, which rows.
    """

    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)

    @classmethod
    def of(cls, family: FamilySpec, header: Mapping[str, TensorEntry]) -> Layout:
        """How a file of this family lies, from the part of its header that is the transformer's."""
        layout = cls()
        for stored, entry in header.items():
            for name, rows in _meant(renamed(stored, family), entry.shape, family):
                layout.names[name] = stored
                layout.shapes[name] = entry.shape
                if rows:
                    layout.rows[name] = rows
                    layout.shapes[name] = (sum(span.stop - span.start for span in rows), *entry.shape[1:])
        return layout


def transformer_part(header: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The transformer of a checkpoint, without the other models in it; the prefix stays on the names."""
    for prefix in PREFIXES:
        part = {name: entry for name, entry in header.items() if name.startswith(prefix)}
        if part:
            return part
    return dict(header)


def renamed(name: str, family: FamilySpec) -> str:
    """A checkpoint's name of a tensor as the diffusers class has it, unless it is `fused` there."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for pattern, replacement in family.renames:
        name = re.sub(pattern, replacement, name)
    return name


def block_spans(blocks: tuple[int, ...], rows: int) -> list[slice]:
    """Where each of the blocks lies, which together have so many rows."""
    ends = [rows * end // sum(blocks) for end in accumulate(blocks, initial=0)]
    return [slice(*pair) for pair in pairwise(ends)]


def _meant(name: str, shape: tuple[int, ...], family: FamilySpec) -> Iterator[tuple[str, Rows]]:
    """The tensors of the class that a stored one stands for, and which of its rows each is; none for all of them."""
    layer, _, leaf = name.rpartition(".")
    for fused in family.fused:
        if found := re.fullmatch(fused.pattern, layer):
            for part, rows in zip(fused.parts, _rows(fused, shape), strict=True):
                yield f"{found.expand(part[0])}.{leaf}", rows
            return
    yield name, ()


def _rows(fused: Fused, shape: tuple[int, ...]) -> list[Rows]:
    """The rows of each part of a fused tensor; a single number is the same for all of them."""
    if math.prod(shape) == 1:
        return [()] * len(fused.parts)
    spans = block_spans(fused.blocks, shape[0])
    return [tuple(spans[block] for block in blocks) for _, blocks in fused.parts]
