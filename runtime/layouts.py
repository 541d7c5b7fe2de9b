"""The tensors of a file by the names that the class of its family has for them, whatever the file calls them."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType

from .families.spec import FamilySpec
from .families.written import Fused
from .parallel.lengths import length_of
from .safetensors_header import TensorEntry
from .stored import BLOCKS, FP8_FORMATS, FP8_WIDENED, WEIGHT_SCALE, Stored
from .weight_files import twice

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "transformer.", "model.")
"""What stands before the transformer's names, in ComfyUI's all-in-one checkpoints, in files of its own and in those of
trainers. No class of a family has a module of such a name."""
STRAY = 5
"""So few tensors behind a prefix are no model."""
VAE_PREFIXES = ("vae.", "first_stage_model.")
"""What stands before the VAE's names in an all-in-one checkpoint."""
TEXT_ENCODER = re.compile(r"text_encoders\.\w+\.transformer\.")
"""What stands before those of each text encoder."""
LEAVES = {"scale_weight": WEIGHT_SCALE}
"""What ComfyUI's older 8-bit files call a tensor of a layer, as we and its newer ones do."""
WITHOUT_USE = ("scaled_fp8", "comfy_quant", "scale_input", "input_scale")
"""Marks of ComfyUI's 8-bit files, of which the formats of their tensors say the same; and scales of inputs, which are not
rounded here."""
Rows = tuple[slice, ...]
"""Spans of a stored tensor's rows, in the order in which they make up another."""


@dataclass(frozen=True)
class Layout:
    """A transformer's tensors by the names of its class: what the file calls each, its shape and, where it is a part of what
    the file has, which rows; and its number format as the header has it. `twice` are those that it has under two names.
    """

    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    twice: dict[str, tuple[str, str]] = field(default_factory=dict)

    def without(self, pattern: str) -> Layout:
        """The same but for tensors of such names."""
        if not pattern:
            return self
        parts = (self.names, self.shapes, self.rows, self.formats, self.twice)
        return Layout(
            *({name: each for name, each in part.items() if not re.fullmatch(pattern, name)} for part in parts)
        )

    def check_once(self, path: Path, beside: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise `Refused` for a tensor that a file has twice: under two names, or here and `beside` it."""
        both = {name: (self.names[name], beside[name]) for name in self.names if name in beside}
        for name, (first, second) in (self.twice | both).items():
            raise twice(path, first, second, name)

    @property
    def stored_formats(self) -> dict[str, str]:
        """The number formats by what the file calls the tensors."""
        return {self.names[name]: number_format for name, number_format in self.formats.items()}

    @classmethod
    def of(cls, family: FamilySpec, header: Mapping[str, TensorEntry]) -> Layout:
        """How a file of this family lies, from the part of its header that is the transformer's."""
        layout = cls()
        used = {name: entry for name, entry in header.items() if name.rpartition(".")[2] not in WITHOUT_USE}
        meant = {stored: renamed(stored, family) for stored in used}
        there = set(meant.values())
        for stored, entry in used.items():
            for name, rows in _meant(meant[stored], entry.shape, family, there):
                if name in layout.names:
                    layout.twice[name] = (layout.names[name], stored)
                layout.names[name] = stored
                layout.shapes[name] = entry.shape
                layout.formats[name] = entry.dtype
                if rows:
                    layout.rows[name] = rows
                    layout.shapes[name] = (length_of(rows), *entry.shape[1:])
        return layout


def transformer_part(header: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The transformer of a checkpoint, without the other models in it; the prefix stays on the names."""
    for prefix in PREFIXES:
        part = {name: entry for name, entry in header.items() if name.startswith(prefix)}
        if len(part) > STRAY:
            return part
    return dict(header)


def has_vae(names: Iterable[str]) -> bool:
    """Whether an all-in-one checkpoint brings a VAE."""
    return any(name.startswith(VAE_PREFIXES) for name in names)


def has_text_encoders(names: Iterable[str]) -> bool:
    """Whether an all-in-one checkpoint brings text encoders."""
    return any(map(TEXT_ENCODER.match, names))


def renamed(name: str, family: FamilySpec) -> str:
    """A checkpoint's name of a tensor as the diffusers class has it, unless it is `fused` there."""
    name = name.removeprefix(next(filter(name.startswith, PREFIXES), ""))
    for pattern, replacement in family.renames:
        name = re.sub(pattern, replacement, name)
    layer, dot, leaf = name.rpartition(".")
    return f"{layer}{dot}{LEAVES.get(leaf, leaf)}"


def eight_bit_layers(layout: Layout, family: FamilySpec) -> dict[str, Stored]:
    """The Linears whose weights are in 8 bits, each scaled by one number at most (see `weight_formats`)."""
    found = {}
    for name, number_format in layout.formats.items():
        layer, _, leaf = name.rpartition(".")
        if number_format not in FP8_FORMATS or leaf != "weight" or len(layout.shapes[name]) != 2:
            continue
        names = {leaf: f"{layer}.{leaf}" for leaf in ("weight", "bias", WEIGHT_SCALE)}
        shapes = {leaf: layout.shapes[name] for leaf, name in names.items() if name in layout.shapes}
        found[layer] = Stored(FP8_WIDENED if family.stays_float32(name) else FP8_FORMATS[number_format], shapes)
    return found


def packed_layers(layout: Layout, family: FamilySpec) -> dict[str, Stored]:
    """The Linears whose weights stay in the blocks of GGUF: those of which whole rows are whole blocks.

    What the model holds in float32, and what may be no Linear, is turned into numbers as it is loaded.
    """
    found = {}
    for name, number_format in layout.formats.items():
        layer, _, leaf = name.rpartition(".")
        block, shape = BLOCKS.get(number_format), layout.shapes[name]
        is_linear = leaf == "weight" and len(shape) == 2 and family.has_linear(layer)
        if block and is_linear and shape[1] % block.elements == 0 and not family.stays_float32(name):
            bias = {"bias": layout.shapes[f"{layer}.bias"]} if f"{layer}.bias" in layout.shapes else {}
            row = shape[1] // block.elements * block.nbytes
            found[layer] = Stored(number_format, {"weight": (shape[0], row), **bias})
    return found


def block_spans(blocks: tuple[int, ...], rows: int) -> list[slice]:
    """Where each of the blocks lies, which together have so many rows."""
    ends = [rows * end // sum(blocks) for end in accumulate(blocks, initial=0)]
    return [slice(*pair) for pair in pairwise(ends)]


def _meant(name: str, shape: tuple[int, ...], family: FamilySpec, there: Container[str]) -> Iterator[tuple[str, Rows]]:
    """The tensors of the class that a stored one stands for, and which of its rows each is; none for all of them. `there` are
    the names of all.
    """
    layer, _, leaf = name.rpartition(".")
    for fused in family.fused:
        if found := fused.match(layer, there):
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
