"""A single file in 4 bits as Nunchaku writes it, by its header alone: which tensors of the model are which of the file.

The format is that of github.com/nunchaku-tech/nunchaku, of both generations of names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import Refused
from .families import FAMILIES
from .families.spec import FamilySpec
from .safetensors_header import TensorEntry
from .stored import SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4, Stored

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
    for module, entries in linears.items():
        _add_linear(path, file, module, entries)
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
    family = next((family for family in FAMILIES.values() if family.transformer_class.lower() == named), None)
    if family is None:
        supported = ", ".join(family.transformer_class for family in FAMILIES.values())
        raise Refused(
            f"{path} is a {config.get('_class_name')} in 4 bits, which is not available yet. Available: {supported}"
        )
    return family, {key: tuple(v) if isinstance(v, list) else v for key, v in config.items() if not key.startswith("_")}


def _add_linear(path: Path, file: PackedFile, module: str, entries: Mapping[str, TensorEntry]) -> None:
    """One Linear of the file, which may be several of the model."""
    unknown = entries.keys() - LEAVES.keys()
    if unknown or "wscales" not in entries:
        raise Refused(
            f"{path}: {module} has {', '.join(sorted(entries))}, which is no 4-bit Linear that is known: choose another file"
        )
    linears = _linears_of(file.family, module)
    rows, rest = divmod(entries[CODES].shape[0], len(linears))
    if rest:
        raise Refused(
            f"{path}: {module} has {entries[CODES].shape[0]} rows for {len(linears)} Linears: download it again"
        )
    shapes = {LEAVES[leaf]: entry.shape for leaf, entry in entries.items()}
    for number, linear in enumerate(linears):
        fused = (number * rows, (number + 1) * rows) if len(linears) > 1 else ()
        file.stored[linear] = Stored(_kind(file.family, linear, entries), shapes, fused)
        file.shapes[f"{linear}.weight"] = (rows, 2 * entries[CODES].shape[1])
        file.names.update({f"{linear}.{LEAVES[leaf]}": f"{module}.{leaf}" for leaf in entries})


def _linears_of(family: FamilySpec, module: str) -> tuple[str, ...]:
    for packed in family.nunchaku:
        pattern = re.escape(packed.stored).replace(re.escape("{}"), r"(\d+)")
        found = re.fullmatch(pattern, module)
        if found:
            return tuple(linear.format(found[1]) for linear in packed.linears)
    return (module,)


def _kind(family: FamilySpec, linear: str, entries: Mapping[str, TensorEntry]) -> str:
    if entries["wscales"].dtype == "F8_E4M3":
        return SVDQUANT_NVFP4
    return SVDQUANT_INT4_UNSIGNED if family.follows_gelu(linear) else SVDQUANT_INT4
