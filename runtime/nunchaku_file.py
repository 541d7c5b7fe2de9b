"""A model in 4 bits as Nunchaku writes it, by its headers alone: which tensors of the model are which of its files.

The format is that of github.com/nunchaku-tech/nunchaku: one file that says its configuration, or a folder of two and a
configuration; and two generations of names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import Refused
from .facts import ModelFacts, Source, facts_of
from .families import FAMILIES
from .families.spec import FamilySpec
from .families.written import PackedLinear
from .layouts import Layout, Rows
from .nunchaku_names import AWQ_LEAVES, CODE_DTYPES, CODES, LEAVES, PLAIN_DTYPES, ROUNDING, check_rounding, check_shapes
from .safetensors_header import TensorEntry, read_header, read_metadata
from .stored import AWQ_INT4, JOINED, SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4, Stored
from .weight_files import merged

FOLDER = ("transformer_blocks.safetensors", "unquantized_layers.safetensors")
"""The two files of a model of the first generation."""
Header = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class PackedFile:
    """What the headers say: `names` and `shapes` by the model's names of the tensors, `rows` where one is a part of what the
    file has, and how each 4-bit Linear lies. `shapes` has the weight that each of those stands for.
    """

    family: FamilySpec
    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)


def is_packed(header: Header) -> bool:
    """Whether a file has 4-bit Linears of this format."""
    return any(name.endswith(f".{CODES}") for name in header)


def is_packed_folder(path: Path) -> bool:
    """Whether a folder is a model of the first generation."""
    return any((path / name).is_file() for name in FOLDER)


def packed_file(path: Path, header: Header) -> ModelFacts:
    """The facts of a file with the tensors of `header`. Raises `Refused`."""
    metadata = read_metadata(path)
    config = _read(metadata, "config")
    if config is None:
        raise Refused(
            f"{path} is in 4 bits, but has no configuration in its metadata, as the single files of Nunchaku have: "
            f"choose one of those, or the folder that it is from"
        )
    check_rounding(path, _read(metadata, ROUNDING), metadata)
    return _facts(path, {path: header}, config)


def packed_folder(path: Path, config: Mapping[str, Any]) -> ModelFacts:
    """The facts of a folder of two files. Raises `Refused`."""
    missing = [name for name in FOLDER if not (path / name).is_file()]
    if missing:
        raise Refused(f"{path} has {' and '.join(set(FOLDER) - set(missing))} but not {missing[0]}: download that too")
    check_rounding(path, config.get(ROUNDING), {})
    return _facts(path, {path / name: read_header(path / name) for name in FOLDER}, config)


def _read(metadata: Mapping[str, str], key: str) -> Any:
    """What a text of the metadata says; None where there is none, or it is not JSON."""
    try:
        return json.loads(metadata[key])
    except (KeyError, ValueError, RecursionError):
        return None


def _facts(path: Path, headers: Mapping[Path, Header], config: Any) -> ModelFacts:
    entries = merged(headers)
    file = PackedFile(*_family_and_config(path, config))
    linears: dict[str, dict[str, TensorEntry]] = {}
    plain: dict[str, TensorEntry] = {}
    packed = {name.removesuffix(f".{CODES}") for name in entries if name.endswith(f".{CODES}")}
    for name, entry in entries.items():
        module, _, leaf = name.rpartition(".")
        if module in packed:
            linears.setdefault(module, {})[leaf] = entry
        else:
            plain[name] = entry
    _add_plain(path, file, plain)
    for module in sorted(linears, key=lambda module: _packed_of(file.family, module).part or 0):
        _add_linear(path, file, module, linears[module])
    return facts_of(
        file.family,
        _completed(path, file),
        sources=tuple(_sources(file, headers)),
        shapes=file.shapes,
        stored=MappingProxyType(file.stored),
    )


def _sources(file: PackedFile, headers: Mapping[Path, Header]) -> Iterator[Source]:
    for path, header in headers.items():
        names = {name: stored for name, stored in file.names.items() if stored in header}
        rows = {name: rows for name, rows in file.rows.items() if name in names}
        yield Source(path, MappingProxyType(names), MappingProxyType(rows))


def _family_and_config(path: Path, config: Any) -> tuple[FamilySpec, dict[str, Any]]:
    config = config if isinstance(config, dict) else {}
    named = str(config.get("_class_name", "")).removeprefix("Nunchaku").lower()
    families = [family for family in FAMILIES.values() if family.transformer_class.lower() == named]
    if not families:
        supported = ", ".join(dict.fromkeys(family.transformer_class for family in FAMILIES.values()))
        raise Refused(
            f"{path} is a {config.get('_class_name')} in 4 bits, which is not available yet. Available: {supported}"
        )
    plain = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items() if not key.startswith("_")}
    family = next((family for family in families if not family.unsupported_config(plain)), None)
    if family is None:
        titles = ", ".join(family.title for family in families)
        other = families[0].unsupported_config(plain)
        raise Refused(f"{path} is {other}, which is not available yet. Available: {titles}")
    return family, plain


def _completed(path: Path, file: PackedFile) -> dict[str, Any]:
    """The configuration, which has to say the sizes of the heads."""
    family = file.family
    for key in filter(None, (family.heads, family.head_dim or family.width, family.layers)):
        if type(file.config.get(key)) is not int or file.config[key] < 1:
            raise Refused(f"{path}: its configuration does not say {key}: download it again")
    return file.config


def _add_plain(path: Path, file: PackedFile, entries: Mapping[str, TensorEntry]) -> None:
    """The tensors that are not in 4 bits."""
    for name, entry in entries.items():
        if entry.dtype not in PLAIN_DTYPES:
            raise Refused(f"{path}: {name} is {entry.dtype}, which no 4-bit file of Nunchaku has: choose another file")
    layout = Layout.of(file.family, entries)
    layout.check_once(path)
    file.names.update(layout.names)
    file.shapes.update(layout.shapes)
    file.rows.update(layout.rows)


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
    check_shapes(path, module, entries)
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
