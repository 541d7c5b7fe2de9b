"""A diffusers folder: of a pipeline with all its parts, or of a transformer alone. What its files say has to agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import Refused
from .facts import ModelFacts, Source, facts_of
from .families import FAMILIES
from .families.spec import FamilySpec
from .json_file import read_json
from .layouts import Layout, eight_bit_layers
from .safetensors_header import read_header
from .weight_files import DIFFUSERS, merged, weight_files
from .weight_formats import check_eight_bit, check_formats

INDEX, CONFIG, TRANSFORMER = "model_index.json", "config.json", "transformer"
PARTS, TEXT_ENCODERS = ("vae", "transformer_2"), ("text_encoder", "text_encoder_2", "text_encoder_3")
"""Folders of a pipeline beside its transformer."""
SAMPLED_ALONE = "the nodes Text Encode, Sampler and Decode run it where diffusers can, on one rank"
NAMED = 3


def pipeline_folder(path: Path) -> ModelFacts:
    """The facts of a folder with a model_index.json. Raises `Refused`."""
    index = read_json(path / INDEX)
    pipeline = index.get("_class_name")
    if not any(pipeline in family.pipeline_classes for family in FAMILIES.values()):
        supported = ", ".join(dict.fromkeys(name for family in FAMILIES.values() for name in family.pipeline_classes))
        raise Refused(
            f"{path} is a model of {pipeline}, which has no family here: {SAMPLED_ALONE}. This takes: {supported}"
        )
    _check_index(path, index)
    parts: dict[str, Any] = {part: path / part for part in PARTS if (path / part).is_dir()}
    parts["text_encoders"] = tuple(path / part for part in TEXT_ENCODERS if (path / part).is_dir())
    boundary = index.get("boundary_ratio") or 0.0
    if type(boundary) is not float or not 0.0 <= boundary <= 1.0:
        raise Refused(f"{path / INDEX} says boundary_ratio {boundary!r}, no part of 1: download it again")
    return replace(transformer_folder(path / TRANSFORMER, pipeline), boundary=boundary, **parts)


def _check_index(path: Path, index: Mapping[str, Any]) -> None:
    """Raise `Refused` where the index is of another pipeline than the transformer beside it."""
    config = path / TRANSFORMER / CONFIG
    said, named, pipeline = read_json(config).get("_class_name"), index.get(TRANSFORMER), index["_class_name"]
    if isinstance(named, list) and named[-1:] != [said]:
        raise Refused(
            f"{path / INDEX} says that the transformer is a {named[-1] if named else None}, but {config} that it is a {said}: "
            f"the folder is of two models, download it again"
        )
    families = _families_of(said)
    if families and not any(pipeline in family.pipeline_classes for family in families):
        raise Refused(
            f"{path / INDEX} says that this is a {pipeline}, but {config} says {said}, which is {_titles(families)}: the folder "
            f"is of two models, download it again"
        )


def transformer_folder(path: Path, pipeline: str = "") -> ModelFacts:
    """The facts of the folder of a transformer, which may be a part of a `pipeline`. Raises `Refused`."""
    config = read_json(path / CONFIG)
    family = _family_of(path, config, pipeline)
    config = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items() if not key.startswith("_")}
    for key in (family.heads, _sized(family), family.layers):
        if type(config.get(key)) is not int or config[key] < 1:
            raise Refused(f"{path / CONFIG} does not say {key}: the file is damaged, download it again")
    headers = {file: read_header(file) for file in weight_files(path, DIFFUSERS)}
    layout = Layout.of(replace(family, renames=(), fused=()), merged(headers))
    check_eight_bit(headers)
    check_formats(path, layout.stored_formats)
    layout.check_once(path)
    _check_weights(path, family, config, layout)
    sources = tuple(
        Source(file, {name: name for name in header if name in layout.names}) for file, header in headers.items()
    )
    stored = MappingProxyType(eight_bit_layers(layout, family))
    found = {"shapes": layout.shapes, "formats": layout.formats}
    return facts_of(family, config, sources=sources, stored=stored, **found)


def _family_of(path: Path, config: Mapping[str, Any], pipeline: str) -> FamilySpec:
    """The one whose class and configuration it is."""
    class_name = config.get("_class_name")
    families = sorted(_families_of(class_name), key=lambda family: pipeline not in family.pipeline_classes)
    if not families:
        supported = ", ".join(family.transformer_class for family in FAMILIES.values())
        raise Refused(f"{path} is a {class_name}, which is not available yet. Available: {supported}")
    family = next((family for family in families if not family.unsupported_config(config)), None)
    if family is None:
        other = families[0].unsupported_config(config)
        raise Refused(f"{path} is {other}, which is not available yet. Available: {_titles(families)}")
    return family


def _check_weights(path: Path, family: FamilySpec, config: Mapping[str, Any], layout: Layout) -> None:
    """Raise `Refused` where the weights are those of another family or size than the configuration says."""
    lacking = [name for name in family.signature if name not in layout.names]
    if lacking:
        others = [other for other in FAMILIES.values() if layout.names.keys() >= set(other.signature)]
        looks = f"; they are those of {_titles(others)}" if others else ""
        raise Refused(
            f"{path / CONFIG} says {family.transformer_class}, but the weights lack {', '.join(lacking[:NAMED])} of "
            f"{family.title}{looks}: the folder is of two models or damaged, download it again"
        )
    width = config[family.heads] * family.head_dim_of(config)
    if not any(width in shape for shape in layout.shapes.values()):
        raise Refused(
            f"{path / CONFIG} says {family.heads} {config[family.heads]} and {_sized(family)} {config[_sized(family)]}, but "
            f"no tensor is {width} wide: the file is damaged, download it again"
        )


def _sized(family: FamilySpec) -> str:
    """Where a configuration says how wide its heads are, one or all of them."""
    return family.head_dim or family.width


def _families_of(class_name: Any) -> list[FamilySpec]:
    return [family for family in FAMILIES.values() if family.transformer_class == class_name]


def _titles(families: list[FamilySpec]) -> str:
    return ", ".join(family.title for family in families)
