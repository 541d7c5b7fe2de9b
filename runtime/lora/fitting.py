"""Whether a LoRA file is for a model, by the names and shapes in its header. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import Refused
from ..facts import ModelFacts
from ..file_names import SAFETENSORS
from ..safetensors_header import TensorEntry, read_header
from ..settings import BOTH_EXPERTS, LoraSettings
from ..stored import FOUR_BIT, JOINED
from ..weight_formats import check_formats
from .formats import REFUSED_ROLES, Roles, group_keys, summary
from .guess import likely_family
from .names import WEIGHT, LayerNames, Names, Target

Layers = Mapping[str, Roles]
"""The keys of each layer, by role."""
SHOWN = 1200
"""Characters of keys that an error shows."""


def check_loras(loras: Iterable[LoraSettings], facts: ModelFacts) -> None:
    """Raise `Refused` for a file that is no LoRA, or is one for another model; those that are off are not looked at."""
    on = [lora for lora in loras if lora.strength]
    names = LayerNames(facts.spec, facts.shapes)
    padded = {layer for layer, stored in facts.stored.items() if stored.kind in (*FOUR_BIT, JOINED)}
    for lora in on if facts.low_noise else for_the_only_one(on):
        file = Path(lora.path)
        header, layers, _ = read_layers(file)
        found = {layer: targets for layer in filter(names.owns, layers) if (targets := names.find(layer))}
        if not found:
            raise fits_nothing(file, layers, names)
        for layer, targets in found.items():
            refuse_kind(file, layers[layer])
            if targets[0].name.removesuffix(WEIGHT) not in padded:
                _check_size(file, header, layer, targets, names, layers)


def for_the_only_one(loras: Sequence[LoraSettings]) -> Sequence[LoraSettings]:
    """The same, for a model of one transformer. Raises `Refused` for one that is for an expert."""
    for lora in loras:
        if lora.expert != BOTH_EXPERTS:
            raise Refused(
                f"{Path(lora.path).name} is for the expert of {lora.expert}, but the model has no two experts: set expert to "
                f"{BOTH_EXPERTS}"
            )
    return loras


def read_layers(file: Path) -> tuple[Mapping[str, TensorEntry], Layers, list[str]]:
    """The header of a file, the keys of each of its layers by role, and its keys of no known role.

    Raises `Refused` when it is no LoRA.
    """
    if file.suffix.lower() not in SAFETENSORS:
        raise Refused(f"{file}: convert this LoRA to .safetensors, the only format that Outrigger reads")
    if not file.is_file():
        raise Refused(f"{file}: no such LoRA. Choose a file that is there")
    header = read_header(file)
    check_formats(file, {name: entry.dtype for name, entry in header.items() if len(entry.shape) > 1})
    layers, unused = group_keys(header)
    if not layers:
        raise Refused(f"{file.name} is not a LoRA: it has keys such as {summary(unused[:3])}")
    return header, layers, unused


def refuse_kind(file: Path, roles: Roles) -> None:
    """Raise `Refused` for a layer of a kind that is told apart but not applied."""
    for role, kind in REFUSED_ROLES.items():
        if role in roles:
            raise Refused(
                f"{file.name} uses {kind} ({roles[role]}), which is not available yet: LoRA, LoHa, LoKr, DoRA and full "
                f"differences are"
            )


def fits_nothing(file: Path, layers: Layers, names: Names) -> Refused:
    """The error for a file that changes nothing of the model of these names."""
    keys = summary(key for roles in layers.values() for key in roles.values())[:SHOWN]
    if not any(map(names.owns, layers)):
        return Refused(f"{file.name} changes a text encoder alone: {_way_out(names)}. Its keys are {keys}")
    return Refused(
        f"{file.name} changes nothing of {names.title}{_likely(layers, names)}. Its keys are {keys}. Choose a LoRA for this model"
    )


def other_size(file: Path, shape: tuple[int, ...], target: Target, names: Names, layers: Collection[str]) -> Refused:
    """The error for a file that changes a tensor as one of another shape."""
    return Refused(
        f"{file.name} changes {target.name} as {shape}, but in this model it is {tuple(names.shapes[target.name])}: choose a "
        f"LoRA for this size of {names.title}{_likely(layers, names)}"
    )


def _check_size(
    file: Path,
    header: Mapping[str, TensorEntry],
    layer: str,
    targets: Sequence[Target],
    names: Names,
    layers: Layers,
) -> None:
    """Raise `Refused` for a low-rank pair whose product has another shape than the tensors that it changes."""
    pair = [header[key].shape for role in ("down", "up") if (key := layers[layer].get(role))]
    if len(pair) < 2 or min(map(len, pair)) < 2:
        return  # of another kind, or damaged, as whoever reads it will tell
    down, up = pair
    fulls = [names.shapes[target.name] for target in targets]
    if (up[0], math.prod(down[1:])) != (sum(full[0] for full in fulls), math.prod(fulls[0][1:])):
        raise other_size(file, (up[0], *down[1:]), targets[0], names, layers)


def _way_out(names: Names) -> str:
    if not names.family.texts:
        return f"ComfyUI encodes the prompts of {names.title}, so put it there, in a LoraLoader behind the CLIP Loader"
    return "set strength_model to 0 and connect a strength_clip"


def _likely(layers: Collection[str], names: Names) -> str:
    """What else the file may be for, where most of its layers are none of this model's."""
    own = sum(bool(names.find(layer)) for layer in layers)
    foreign = names.family is not None and 2 * own < len(layers)
    likely = likely_family(layers, but=names.family.name) if foreign else ""
    return f"; it looks like a LoRA for {likely}" if likely else ""
