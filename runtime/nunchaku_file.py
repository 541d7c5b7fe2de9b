"""A single file in 4 bits as Nunchaku writes it, by its header alone: which tensors of the model are which of the file.

The format is that of github.com/nunchaku-tech/nunchaku, of both generations of names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import Refused
from .families import FAMILIES
from .families.spec import FamilySpec, PackedLinear
from .safetensors_header import TensorEntry
from .stored import AWQ_INT4, JOINED, SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4, Stored

CODES = "qweight"
LEAVES = {
    name: name
    for name in (
        CODES,
        "wscales",
        "wcscales",
        "wtscale",
        "proj_down",
        "proj_up",
        "smooth_factor",
        "smooth_factor_orig",
        "bias",
    )
} | {"lora_down": "proj_down", "lora_up": "proj_up", "smooth": "smooth_factor", "smooth_orig": "smooth_factor_orig"}
"""What a file calls a tensor of a 4-bit Linear -> what we do; the first generation had other names."""
AWQ_LEAVES = frozenset((CODES, "wscales", "wzeros", "bias"))
CODE_DTYPES = ("I8", "U8", "I32")
"""Two codes in a byte; in an I32 those of a Linear of which only the weight is in 4 bits."""
Header = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class PackedFile:
    """What the header says: `names` and `shapes` by the model's names of the tensors, and how each 4-bit Linear lies.

    `shapes` has the weight that each of those stands for.
    """

    family: FamilySpec
    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)


def is_packed(header: Header) -> bool:
    """Whether a file has 4-bit Linears of this format."""
    return any(name.endswith(f".{CODES}") for name in header)


def read_packed(path: Path, header: Header, metadata: Mapping[str, str], *, rename: Callable[..., str]) -> PackedFile:
    """What is in the file. `rename` gives a plain tensor's name in the model. Raises `Refused`."""
    family, config = _family_and_config(path, metadata)
    file = PackedFile(family, config)
    linears: dict[str, dict[str, TensorEntry]] = {}
    packed = {name.removesuffix(f".{CODES}") for name in header if name.endswith(f".{CODES}")}
    for name, entry in header.items():
        module, _, leaf = name.rpartition(".")
        if module in packed:
            linears.setdefault(module, {})[leaf] = entry
        else:
            file.names[rename(name, family)] = name
            file.shapes[rename(name, family)] = entry.shape
    for module in sorted(linears, key=lambda module: _packed_of(family, module).part or 0):
        _add_linear(path, file, module, linears[module])
    return file


def _family_and_config(path: Path, metadata: Mapping[str, str]) -> tuple[FamilySpec, dict[str, Any]]:
    try:
        config = json.loads(metadata["config"])
        named = str(config.get("_class_name", "")).removeprefix("Nunchaku").lower()
    except (KeyError, ValueError, RecursionError, AttributeError) as error:
        raise Refused(
            f"{path} is in 4 bits, but has no configuration in its metadata, as the single files of Nunchaku have: "
            f"choose one of those, or merge the folder of the older kind into one"
        ) from error
    alike = [family for family in FAMILIES.values() if family.transformer_class.lower() == named]
    if not alike:
        supported = ", ".join(family.transformer_class for family in FAMILIES.values())
        raise Refused(
            f"{path} is a {config.get('_class_name')} in 4 bits, which is not available yet. Available: {supported}"
        )
    family = next((family for family in alike if not family.unsupported_config(config)), alike[0])
    return family, {key: tuple(v) if isinstance(v, list) else v for key, v in config.items() if not key.startswith("_")}


def _add_linear(path: Path, file: PackedFile, module: str, entries: Mapping[str, TensorEntry]) -> None:
    """One Linear of the file, which may be several of the model."""
    codes = entries[CODES]
    if codes.dtype not in CODE_DTYPES or len(codes.shape) != 2:
        raise Refused(
            f"{path} is damaged: {module}.{CODES} is {codes.dtype} {codes.shape}, but 4-bit codes are rows of bytes. "
            f"Download it again"
        )
    for_16_bits = codes.dtype == "I32"
    unknown = entries.keys() - (AWQ_LEAVES if for_16_bits else LEAVES.keys())
    if unknown or "wscales" not in entries or (for_16_bits and not entries.keys() >= AWQ_LEAVES):
        raise Refused(
            f"{path}: {module} has {', '.join(sorted(entries))}, which is no 4-bit Linear that is known: choose another file"
        )
    if for_16_bits:
        _add_awq(file, module, entries)
        return
    packed = _packed_of(file.family, module)
    if packed.part is not None:
        _add_part(file, packed, module, entries)
        return
    rows, rest = divmod(entries[CODES].shape[0], len(packed.linears))
    if rest:
        raise Refused(
            f"{path}: {module} has {entries[CODES].shape[0]} rows for {len(packed.linears)} Linears: download it again"
        )
    for number, linear in enumerate(packed.linears):
        fused = (number * rows, (number + 1) * rows) if len(packed.linears) > 1 else ()
        file.stored[linear] = Stored(_kind(file.family, linear, entries), _shapes(entries), fused)
        file.shapes[f"{linear}.weight"] = (rows, 2 * entries[CODES].shape[1])
        file.names.update({f"{linear}.{LEAVES[leaf]}": f"{module}.{leaf}" for leaf in entries})


def _add_part(file: PackedFile, packed: PackedLinear, module: str, entries: Mapping[str, TensorEntry]) -> None:
    """One Linear of the file which with others makes up one of the model. They come in the order of their inputs."""
    [linear] = packed.linears
    place = f"@{packed.part}"
    before = file.stored.get(linear, Stored(JOINED))
    own = Stored(_kind(file.family, linear + place, entries), _shapes(entries))
    n, k = entries[CODES].shape[0], 2 * entries[CODES].shape[1]
    file.stored[linear] = Stored(
        JOINED,
        {**before.shapes, **{leaf + place: shape for leaf, shape in own.shapes.items()}},
        joined=(*before.joined, own),
        inputs=(*before.inputs, k),
    )
    file.shapes[f"{linear}.weight"] = (n, sum((*before.inputs, k)))
    file.names.update({f"{linear}.{LEAVES[leaf]}{place}": f"{module}.{leaf}" for leaf in entries})


def _shapes(entries: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    return {LEAVES[leaf]: entry.shape for leaf, entry in entries.items()}


def _add_awq(file: PackedFile, module: str, entries: Mapping[str, TensorEntry]) -> None:
    """A Linear of which only the weight is in 4 bits."""
    file.stored[module] = Stored(AWQ_INT4, {leaf: entry.shape for leaf, entry in entries.items()})
    file.shapes[f"{module}.weight"] = (4 * entries[CODES].shape[0], 2 * entries[CODES].shape[1])
    file.names.update({f"{module}.{leaf}": f"{module}.{leaf}" for leaf in entries})


def _packed_of(family: FamilySpec, module: str) -> PackedLinear:
    """What a Linear of the file is to the model; what the family does not name is the one of that name."""
    for packed in family.nunchaku:
        pattern = re.escape(packed.stored).replace(re.escape("{}"), r"(\d+)")
        found = re.fullmatch(pattern, module)
        if found:
            return replace(packed, linears=tuple(linear.format(found[1]) for linear in packed.linears))
    return PackedLinear(module, (module,))


def _kind(family: FamilySpec, linear: str, entries: Mapping[str, TensorEntry]) -> str:
    if entries["wscales"].dtype == "F8_E4M3":
        return SVDQUANT_NVFP4
    return SVDQUANT_INT4_UNSIGNED if family.follows_gelu(linear) else SVDQUANT_INT4
