"""A LoRA file as changes to the tensors of one model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import Refused
from ..parallel.shares import Cut
from .build import weight_change
from .changes import Change, Difference
from .fitting import Layers, fits_nothing, other_size, read_layers, refuse_kind
from .formats import BIAS, summary, unread_roles
from .names import Names, Target, bias_of


@dataclass(frozen=True)
class LoraFile:
    """What a file changes, by the model's name of a tensor; the keys that no tensor of the model was found for, and those of
    `others`, which are for models of another kind: the text encoders, or the transformer.
    """

    path: Path
    changes: Mapping[str, Change]
    unused: tuple[str, ...]
    others: tuple[str, ...]

    def report(self, names: Names) -> str:
        """A line for the node: how much was applied, and by name what was not."""
        parts = [f"{self.path.name}: {len(self.changes)} target{'s'[: len(self.changes) != 1]} {_applied_to(names)}"]
        idle = [name for name, change in self.changes.items() if change.adds_nothing]
        parts += [f"{len(idle)} of them by nothing, since their alpha is 0: {summary(idle)}"] if idle else []
        if names.family and self.others:
            encoded = f"not applied, since ComfyUI encodes the prompts of {names.title}"
            where = "left to Outrigger Text Encode" if names.family.texts else encoded
            parts.append(f"{where}: {summary(self.others)}")
        parts += [f"not applied: {summary(self.unused)}"] if self.unused else []
        return "; ".join(parts)


def read_lora(path: str, *, names: Names) -> LoraFile:
    """Read a file for the model of these names. For a text encoder it may change nothing.

    Raises `Refused` when it is no LoRA, of a kind that is not applied, for another model, or damaged.
    """
    file = Path(path)
    layers, unused = read_layers(file)[1:]
    everything = layers
    layers = {layer: roles for layer, roles in layers.items() if names.owns(layer)}
    others = [key for layer, roles in everything.items() if layer not in layers for key in roles.values()]
    unused, others = _sorted_out(unused, others, names)
    targets = {layer: names.find(layer) for layer in layers}
    for layer in filter(targets.__getitem__, layers):
        refuse_kind(file, layers[layer])
        unused += [layers[layer][role] for role in unread_roles(layers[layer])]
        if BIAS in layers[layer] and not any(bias_of(target, names.shapes) for target in targets[layer]):
            unused.append(layers[layer][BIAS])
    unused += [key for layer, roles in layers.items() if not targets[layer] for key in roles.values()]
    changes: dict[str, Change] = {}
    for target, change in _changes(file, layers, targets, names):
        if target.name in changes:
            raise Refused(f"{file.name} has two changes of {target.name}: download it again")
        changes[target.name] = _fitting(file, _rows_for(file, change, target), target, names, layers)
    if not changes and names.family:
        raise fits_nothing(file, everything, names)
    return LoraFile(file, changes, tuple(sorted(unused)), tuple(sorted(others)))


def _sorted_out(unused: Iterable[str], others: Sequence[str], names: Names) -> tuple[list[str], list[str]]:
    """The keys of no known role with those that are of the model of these names, or of the others."""
    own, foreign = [], list(others)
    for key in unused:
        (own if names.owns(key) else foreign).append(key)
    return own, foreign


def _applied_to(names: Names) -> str:
    return "applied" if names.family else f"applied to {names.title}"


def _changes(
    file: Path, layers: Layers, targets: Mapping[str, tuple[Target, ...]], names: Names
) -> Iterator[tuple[Target, Change]]:
    """Every change that a file makes. No tensor stays in the file, which may be written anew while it is in use."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for layer in filter(targets.__getitem__, layers):
                tensors = {role: opened.get_tensor(key).clone() for role, key in layers[layer].items()}
                change = weight_change(tensors)
                yield from ((target, change) for target in targets[layer] if change is not None)
                biases = [bias for target in targets[layer] if (bias := bias_of(target, names.shapes))]
                yield from ((bias, Difference(tensors[BIAS])) for bias in biases if BIAS in tensors)
    except (OSError, SafetensorError) as error:
        raise Refused(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise Refused(f"{file.name} is damaged at {layer}: {error}. Download it again") from error


def _rows_for(file: Path, change: Change, target: Target) -> Change:
    try:
        return change.rows(Cut(0, target.rows))
    except ValueError as error:
        raise Refused(
            f"{file.name} cannot be split for {target.name}: {error}, which is not available yet. Choose a LoRA without it"
        ) from error


def _fitting(file: Path, change: Change, target: Target, names: Names, layers: Collection[str]) -> Change:
    """The change, whose shape must be that of its target."""
    full = tuple(names.shapes[target.name])
    if change.shape in (full, (full[0], math.prod(full[1:]))):
        return change
    raise other_size(file, change.shape, target, names, layers)
