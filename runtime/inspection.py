"""What lies at a path: family, configuration and files of a model, without torch and without reading a weight."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import Refused
from .facts import ModelFacts, Source, facts_of
from .families import FAMILIES
from .families.spec import FamilySpec
from .file_names import GGUF_SUFFIX, PICKLED, READ, check_file_name
from .gguf_header import read_gguf
from .layouts import Layout, eight_bit_layers, has_text_encoders, has_vae, packed_layers, transformer_part
from .nunchaku_file import is_packed, is_packed_folder, packed_file, packed_folder
from .safetensors_header import TensorEntry, read_header, read_metadata
from .settings import TINY_SHAPES
from .stored import BLOCKS, FP8, FP8_FORMATS, PLAIN, Stored
from .tiny_shapes import MODEL_FOLDER

RANDOM, INDEX, WEIGHTS = "random:", "model_index.json", "diffusion_pytorch_model.safetensors"
PARTS, TEXT_ENCODERS = ("vae", "transformer_2"), ("text_encoder", "text_encoder_2", "text_encoder_3")
"""Folders of a pipeline beside its transformer."""
RECORDED = Path(__file__).resolve().parent / "families" / "tiny"
"""Written by `python -m tests.record_tiny`."""
ALIKE = 0.75
"""So much of a family's signature makes a file one of it that lacks the rest; families have names in common."""
MAX_JSON_BYTES = 64 << 20
SAMPLED_ALONE = "the nodes Text Encode, Sampler and Decode run it where diffusers can, on one rank"
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `Refused` when it is missing, huge or something else."""
    if not path.is_file():
        raise Refused(f"{path} is missing: the model folder is not complete, download it again")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise Refused(f"{path} has {path.stat().st_size} bytes: that is no configuration")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON: download it again") from error
    if not isinstance(content, dict):
        raise Refused(f"{path} is not a JSON object: download it again")
    return content


def _random(model: str) -> ModelFacts:
    name = model.removeprefix(RANDOM)
    if name not in FAMILIES:
        raise Refused(f"{model}: no family {name!r}; there are: {', '.join(FAMILIES)}")
    return facts_of(FAMILIES[name], FAMILIES[name].tiny, name=model, shapes=_recorded_shapes(name))


def _recorded_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a family's `TINY`, which its class alone could tell; none where they were not recorded."""
    path = RECORDED / f"{family}.json"
    return {name: tuple(shape) for name, shape in read_json(path).items()} if path.is_file() else {}


# A diffusers folder -------------------------------------------------------------------------------------------------


def _folder(path: Path) -> ModelFacts:
    if (path / INDEX).is_file():
        return _pipeline_folder(path)
    if is_packed_folder(path):
        return packed_folder(path, read_json(path / "config.json"))
    if (path / "config.json").is_file():
        return _transformer_folder(path)
    raise Refused(
        f"{path} has no model_index.json: it is not a diffusers model folder. Choose the folder that holds "
        f"model_index.json and transformer/, or {_files_in(path)}"
    )


def _files_in(folder: Path) -> str:
    """The files of a folder that a model may be in, in words."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in READ)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"one of its files: {', '.join(names[:NAMED])}{more}" if names else f"a {READ[0]} or {GGUF_SUFFIX} file"


def _pipeline_folder(path: Path) -> ModelFacts:
    index = read_json(path / INDEX)
    pipeline = index.get("_class_name")
    if not any(pipeline in family.pipeline_classes for family in FAMILIES.values()):
        supported = ", ".join(dict.fromkeys(name for family in FAMILIES.values() for name in family.pipeline_classes))
        raise Refused(
            f"{path} is a model of {pipeline}, which has no family here: {SAMPLED_ALONE}. This takes: {supported}"
        )
    parts: dict[str, Any] = {part: path / part for part in PARTS if (path / part).is_dir()}
    parts["text_encoders"] = tuple(path / part for part in TEXT_ENCODERS if (path / part).is_dir())
    boundary = index.get("boundary_ratio") or 0.0
    if type(boundary) is not float or not 0.0 <= boundary <= 1.0:
        raise Refused(f"{path / INDEX} says boundary_ratio {boundary!r}, no part of 1: download it again")
    return replace(_transformer_folder(path / "transformer", pipeline), boundary=boundary, **parts)


def _transformer_folder(path: Path, pipeline: str = "") -> ModelFacts:
    config = read_json(path / "config.json")
    class_name = config.get("_class_name")
    families = [family for family in FAMILIES.values() if family.transformer_class == class_name]
    families.sort(key=lambda family: pipeline not in family.pipeline_classes)
    if not families:
        supported = ", ".join(family.transformer_class for family in FAMILIES.values())
        raise Refused(f"{path} is a {class_name}, which is not available yet. Available: {supported}")
    family = next((family for family in families if not family.unsupported_config(config)), None)
    if family is None:
        titles = ", ".join(family.title for family in families)
        other = families[0].unsupported_config(config)
        raise Refused(f"{path} is {other}, which is not available yet. Available: {titles}")
    config = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items() if not key.startswith("_")}
    sized = family.head_dim or family.width
    for key in (family.heads, sized, family.layers):
        if type(config.get(key)) is not int or config[key] < 1:
            raise Refused(f"{path / 'config.json'} does not say {key}: the file is damaged, download it again")
    headers = {file: read_header(file) for file in _weight_files(path)}
    entries = {name: entry for header in headers.values() for name, entry in header.items()}
    layout = Layout.of(replace(family, renames=(), fused=()), entries)
    _refuse_formats(path, layout.stored_formats)
    width = config[family.heads] * family.head_dim_of(config)
    if not any(width in entry.shape for entry in entries.values()):
        raise Refused(
            f"{path / 'config.json'} says {family.heads} {config[family.heads]} and {sized} "
            f"{config[sized]}, but no tensor is {width} wide: the file is damaged, download it again"
        )
    sources = tuple(
        Source(file, {name: name for name in header if name in layout.names}) for file, header in headers.items()
    )
    return facts_of(family, config, sources=sources, shapes=layout.shapes, stored=_eight_bit(path, layout, family))


def _weight_files(path: Path) -> list[Path]:
    index = path / f"{WEIGHTS}.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
        files = [path / name for name in names if name == Path(name).name]
    else:
        files = [path / WEIGHTS]
    for file in files:
        if not file.is_file():
            pickled = sorted(found.name for found in path.iterdir() if found.suffix in PICKLED)
            raise Refused(f"{file} is missing{_pickled_too(pickled)}: download the .safetensors weights")
    if not files:
        raise Refused(f"{index} lists no files: download it again")
    return files


def _pickled_too(pickled: list[str]) -> str:
    return f" ({pickled[0]} is a pickle, which can run code and is never opened)" if pickled else ""


# A single file ------------------------------------------------------------------------------------------------------


def _file(path: Path) -> ModelFacts:
    check_file_name(path)
    read = read_gguf if path.suffix.lower() == GGUF_SUFFIX else read_header
    whole = read(path)
    header = transformer_part(whole)
    if is_packed(header):
        return packed_file(path, header)
    layouts = {family.name: Layout.of(family, header) for family in FAMILIES.values()}
    shares = {family.name: _share(family, layouts[family.name].shapes) for family in FAMILIES.values()}
    enough = max(*shares.values(), ALIKE)
    alike = [family for family in FAMILIES.values() if shares[family.name] >= enough]
    found: list[ModelFacts | Refused] = [_attempt(family, path, header, layouts[family.name]) for family in alike]
    said = {} if read is read_gguf else read_metadata(path)
    facts = [each for each in found if isinstance(each, ModelFacts) and each.spec.told_by(said)]
    if len(facts) == 1:
        parts = {"vae": path if has_vae(whole) else None, "text_encoders": (path,) * has_text_encoders(whole)}
        return replace(facts[0], **parts)
    if facts:
        raise Refused(
            f"{path} can be read as more than one architecture ({', '.join(each.spec.title for each in facts)}): it is not "
            f"the file of one model. Choose one that is"
        )
    raise found[0] if found else Refused(_unknown(path, header))


def _unknown(path: Path, header: Mapping[str, TensorEntry]) -> str:
    titles = "; ".join(family.title for family in FAMILIES.values())
    return (
        f"{path} is of no architecture that is available. It has {len(header)} tensors such as "
        f"{', '.join(sorted(header)[:NAMED])}; looked for those of: {titles}. Choose a file of one of these"
    )


def _attempt(family: FamilySpec, path: Path, header: Mapping[str, TensorEntry], layout: Layout) -> ModelFacts | Refused:
    """The facts of a file that looks like this family, or why it is not of it."""
    try:
        return _file_of(family, path, header, layout)
    except Refused as refusal:
        return refusal


def _share(family: FamilySpec, names: Mapping[str, Any]) -> float:
    """How much of a family's signature is there."""
    return sum(name in names for name in family.signature) / len(family.signature)


def _file_of(family: FamilySpec, path: Path, header: Mapping[str, TensorEntry], layout: Layout) -> ModelFacts:
    for variant in family.variants:
        if variant.tensor in layout.names:
            raise Refused(
                f"{path} is {variant.name} (it has {layout.names[variant.tensor]}), which is not available yet. "
                f"Available: {family.title}"
            )
    missing = [name for name in family.signature if name not in layout.names]
    if missing:
        raise Refused(f"{path} looks like {family.title}, but lacks {', '.join(missing)}: download it again")
    layout = layout.without(family.unused)
    names, shapes = layout.names, layout.shapes
    _refuse_formats(path, layout.stored_formats)
    try:
        config = family.config_from(shapes)
    except (KeyError, IndexError, ValueError) as error:
        raise Refused(f"{path} looks like {family.title}, but its tensors do not fit together ({error})") from error
    other = family.unsupported_config(config)
    if other:
        raise Refused(f"{path} is {other}, which is not available yet. Available: {family.title}")
    if config[family.heads] < 1:
        raise Refused(f"{path} is too narrow for {family.title}: {shapes[family.signature[0]]}")
    packed = packed_layers(layout, family)
    stored = MappingProxyType({**_eight_bit(path, layout, family), **packed})
    coded = frozenset(names[f"{layer}.weight"] for layer in packed)
    sources = (Source(path, MappingProxyType(names), MappingProxyType(layout.rows), coded),)
    return facts_of(family, config, sources=sources, shapes=shapes, stored=stored)


def _refuse_formats(path: Path, formats: Mapping[str, str]) -> None:
    for name, number_format in formats.items():
        if number_format not in ("F64", "F32", "F16", "BF16", *FP8_FORMATS, *BLOCKS):
            raise Refused(
                f"{path} is quantised ({name} is {number_format}), which is not available yet: use the bf16 file"
            )


def _eight_bit(path: Path, layout: Layout, family: FamilySpec) -> Mapping[str, Stored]:
    try:
        return MappingProxyType(eight_bit_layers(layout, family))
    except ValueError as error:
        raise Refused(
            f"{path} is quantised to 8 bit in a way that is not available ({error}): use the bf16 file"
        ) from error
