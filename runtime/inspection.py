"""What lies at a path: family, configuration and files of a model, without torch and without reading a weight."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import Refused
from .facts import ModelFacts, Source, facts_of
from .families import FAMILIES
from .families.spec import FamilySpec
from .file_names import GGUF_SUFFIX, READ, check_file_name, is_gguf
from .gguf_header import read_gguf, read_texts
from .json_file import read_json
from .layouts import Layout, eight_bit_layers, has_text_encoders, has_vae, packed_layers, transformer_part
from .model_folder import CONFIG, INDEX, pipeline_folder, transformer_folder
from .nunchaku_file import is_packed, is_packed_folder, packed_file, packed_folder
from .other_files import what_else
from .safetensors_header import TensorEntry, read_header, read_metadata
from .settings import TINY_SHAPES
from .stored import FP8, PLAIN, WEIGHT_SCALE, Stored
from .tiny_shapes import MODEL_FOLDER
from .weight_formats import check_eight_bit, check_formats

RANDOM = "random:"
RECORDED = Path(__file__).resolve().parent / "families" / "tiny"
"""Written by `python -m tests.record_tiny`."""
ALIKE = 0.75
"""So much of a family's signature makes a file one of it that lacks the rest; families have names in common."""
SHOWN, NAMED = 300, 3
"""Characters of a path and files of a folder that an error shows."""


def inspect_model(model: str, *, quant: str = PLAIN) -> ModelFacts:
    """The facts of `tiny-shapes`, `random:FAMILY`, a diffusers folder, a transformer folder or a .safetensors file.

    `quant` is what its Linears become as they are loaded. Raises `Refused`, with the path, what was found and the way out.
    """
    facts = _found(model)
    if quant == PLAIN:
        return facts
    if facts.stored:
        raise Refused(f"{facts.name} is quantised already: set quant to {PLAIN}, which runs it as it is stored")
    linears = {name.removesuffix(".weight") for name in facts.shapes if name.endswith(".weight")}
    suits = facts.spec.in_block if quant == FP8 else facts.spec.four_bit
    chosen = {
        name: Stored(quant) for name in sorted(linears) if len(facts.shapes[f"{name}.weight"]) == 2 and suits(name)
    }
    if not chosen:
        raise Refused(f"quant {quant}: no Linear of {facts.name} can be held so. Set quant to {PLAIN}")
    return replace(facts, stored=MappingProxyType(chosen))


def _found(model: str) -> ModelFacts:
    if model.startswith(RANDOM):
        return _random(model)
    path = MODEL_FOLDER if model == TINY_SHAPES else Path(model)
    try:
        facts = _at(path)
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error}): let this user read it, or choose another") from error
    return replace(facts, name=TINY_SHAPES if model == TINY_SHAPES else path.name)


def _at(path: Path) -> ModelFacts:
    if os.path.isdir(path):  # unlike Path.is_dir, at peace with names that no file can have
        return _folder(path)
    if os.path.isfile(path):
        return _file(path)
    shown = ascii(str(path)[:SHOWN])[1:-1]
    raise Refused(f"{shown}: no such file or folder. Choose a .safetensors file or a diffusers folder")


def _random(model: str) -> ModelFacts:
    name = model.removeprefix(RANDOM)
    if name not in FAMILIES:
        raise Refused(f"{model}: no family {name!r}; there are: {', '.join(FAMILIES)}")
    return facts_of(FAMILIES[name], FAMILIES[name].tiny, name=model, shapes=_recorded_shapes(name))


def _recorded_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a family's `TINY`, which its class alone could tell; none where they were not recorded."""
    path = RECORDED / f"{family}.json"
    return {name: tuple(shape) for name, shape in read_json(path).items()} if path.is_file() else {}


def _folder(path: Path) -> ModelFacts:
    if (path / INDEX).is_file():
        return pipeline_folder(path)
    if is_packed_folder(path):
        return packed_folder(path, read_json(path / CONFIG))
    if (path / CONFIG).is_file():
        return transformer_folder(path)
    raise Refused(
        f"{path} has no model_index.json: it is not a diffusers model folder. Choose the folder that holds "
        f"model_index.json and transformer/, or {_files_in(path)}"
    )


def _files_in(folder: Path) -> str:
    """The files of a folder that a model may be in, in words."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in READ)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"one of its files: {', '.join(names[:NAMED])}{more}" if names else f"a {READ[0]} or {GGUF_SUFFIX} file"


def _file(path: Path) -> ModelFacts:
    check_file_name(path)
    whole = (read_gguf if is_gguf(path) else read_header)(path)
    header = transformer_part(whole)
    if is_packed(header):
        return packed_file(path, header)
    layouts = _layouts(header)
    shares = {family.name: _share(family, layouts[family.name].shapes) for family in FAMILIES.values()}
    enough = max(*shares.values(), ALIKE)
    alike = [family for family in FAMILIES.values() if shares[family.name] >= enough]
    found: list[ModelFacts | Refused] = [_attempt(family, path, header, layouts[family.name]) for family in alike]
    said = (read_texts if is_gguf(path) else read_metadata)(path)
    near = [each for each in found if isinstance(each, ModelFacts | Strangers) and each.spec.told_by(said)]
    if len(near) > 1:
        raise Refused(
            f"{path} can be read as more than one architecture ({', '.join(each.spec.title for each in near)}): it is not "
            f"the file of one model. Choose one that is"
        )
    [facts] = near or found[:1] or [Refused(_unknown(path, header))]
    if isinstance(facts, Refused):
        raise facts
    beside = {name: entry for name, entry in whole.items() if name not in header}
    layouts[facts.family].check_once(path, Layout.of(facts.spec, beside).names)
    parts = {"vae": path if has_vae(whole) else None, "text_encoders": (path,) * has_text_encoders(whole)}
    return replace(facts, **parts)


def _layouts(header: Mapping[str, TensorEntry]) -> dict[str, Layout]:
    """How a file lies for each family; worked out once for those that name their tensors alike."""
    alike = {(family.renames, family.fused): family for family in FAMILIES.values()}
    layouts = {names: Layout.of(family, header) for names, family in alike.items()}
    return {family.name: layouts[family.renames, family.fused] for family in FAMILIES.values()}


def _unknown(path: Path, header: Mapping[str, TensorEntry]) -> str:
    if other := what_else(header):
        way_out = f": {other.way_out}" if other.way_out else ""
        return f"{path} is {other.title}, no model that is available{way_out}. Load Model {_looked_for()}"
    first = ", ".join(sorted(header)[:NAMED])
    return (
        f"{path} is of no architecture that is available. It has {len(header)} tensors such as {first}; {_looked_for()}"
    )


def _looked_for() -> str:
    titles = "; ".join(family.title for family in FAMILIES.values())
    return f"looked for those of: {titles}. Choose a file of one of these"


def _attempt(family: FamilySpec, path: Path, header: Mapping[str, TensorEntry], layout: Layout) -> ModelFacts | Refused:
    """The facts of a file that looks like this family, or why it is not of it."""
    try:
        return _file_of(family, path, header, layout)
    except Refused as refusal:
        return refusal


def _share(family: FamilySpec, names: Mapping[str, Any]) -> float:
    """How much of a family's signature is there."""
    return sum(name in names for name in family.signature) / len(family.signature)


class Strangers(Refused):
    """A file has all tensors of a family, and more."""

    def __init__(self, path: Path, spec: FamilySpec, names: list[str]) -> None:
        self.spec = spec
        super().__init__(
            f"{path} has unknown {len(names)} tensor{'s'[: len(names) > 1]} beside those of {spec.title}: "
            f"{', '.join(names[:NAMED])}{' ...' if len(names) > NAMED else ''}: it is a relative that is not available, or damaged. "
            f"Choose a checkpoint of this family"
        )


def _strangers(family: FamilySpec, names: Iterable[str]) -> list[str]:
    """Those of the names that no tensor of a family has, whatever the number of its block."""
    known = set(map(_of_any_block, (*_recorded_shapes(family.name), *family.rare)))
    return [name for name in names if _of_any_block(name.replace(f".{WEIGHT_SCALE}", ".weight")) not in known]


def _of_any_block(name: str) -> str:
    return re.sub(r"\d+", "0", name, count=1)


def _file_of(family: FamilySpec, path: Path, header: Mapping[str, TensorEntry], layout: Layout) -> ModelFacts:
    for variant in family.variants:
        if variant.tensor in layout.names:
            raise Refused(
                f"{path} is {variant.name} (it has {layout.names[variant.tensor]}), which is not available yet. "
                f"Available: {family.title}"
            )
    missing = [name for name in family.signature if name not in layout.names]
    if missing:
        raise Refused(
            f"{path} looks like {family.title}, but lacks {', '.join(missing)}: it is damaged, or a relative that is not "
            f"available; {_looked_for()}"
        )
    layout = layout.without(family.unused)
    names, shapes = layout.names, layout.shapes
    layout.check_once(path)
    if not is_gguf(path):
        check_eight_bit({path: header})
    check_formats(path, layout.stored_formats)
    try:
        config = family.config_from(shapes)
    except KeyError as error:
        raise Refused(
            f"{path} looks like {family.title}, but lacks {error.args[0]}: it is damaged, or a relative that is not available"
        ) from error
    except (IndexError, ValueError) as error:
        raise Refused(f"{path} looks like {family.title}, but its tensors do not fit together ({error})") from error
    other = family.unsupported_config(config)
    if other:
        raise Refused(f"{path} is {other}, which is not available yet. Available: {family.title}")
    if strange := _strangers(family, shapes):
        raise Strangers(path, family, [names[name] for name in strange])
    if config[family.heads] < 1:
        raise Refused(f"{path} is too narrow for {family.title}: {shapes[family.signature[0]]}")
    packed = packed_layers(layout, family)
    stored = MappingProxyType({**eight_bit_layers(layout, family), **packed})
    coded = frozenset(names[f"{layer}.weight"] for layer in packed)
    sources = (Source(path, MappingProxyType(names), MappingProxyType(layout.rows), coded),)
    return facts_of(family, config, sources=sources, shapes=shapes, formats=layout.formats, stored=stored)
