"""The layer names of LoRA files -> the tensors of the model that they mean.

A file may write a layer as the diffusers class or the original code does, behind several prefixes, and with its dots as
underscores. All of that follows from the names of the model's tensors and the `renames` of its family.
"""

from __future__ import annotations

import re
from itertools import product
from typing import NamedTuple, Protocol

from ..families.spec import FamilySpec
from ..families.written import Shapes
from ..layouts import Rows, block_spans, renamed
from .formats import TEXT_ENCODER

FLAT_PREFIXES = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
"""Of Wan Fun, kohya and musubi, OneTrainer, SimpleTuner: underscores stand behind them in the place of dots."""
PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.", "pipe.dit.")
MAX_UNDERSCORES = 12
WEIGHT = ".weight"


class Target(NamedTuple):
    """A tensor of the model, and which rows of a file's layer go to it, in their order; none for all."""

    name: str
    rows: Rows = ()


class Names(Protocol):
    """The tensors of one model, found by what files call them. `family` is None for a text encoder."""

    title: str
    family: FamilySpec | None
    shapes: Shapes

    def owns(self, layer: str) -> bool:
        """Whether a layer of a file is meant for a model of this kind: a transformer, or a text encoder."""

    def find(self, layer: str) -> tuple[Target, ...]:
        """The weights that a layer of a file stands for; empty when the model has none."""


class LayerNames:
    """`Names` of a transformer."""

    def __init__(self, family: FamilySpec, shapes: Shapes) -> None:
        self.family, self.title, self.shapes = family, family.title, shapes
        self._flat = {name.removesuffix(WEIGHT).replace(".", "_"): name for name in shapes if name.endswith(WEIGHT)}
        self._dots: dict[str, tuple[str, ...] | None] = {}

    def owns(self, layer: str) -> bool:
        """Whether it is no layer of a text encoder."""
        return TEXT_ENCODER.match(layer) is None

    def find(self, layer: str) -> tuple[Target, ...]:
        """The weights that a layer of a file stands for; empty when the model has none.

        Parameters that lie beside layers, such as Wan's modulations, are not among them: ComfyUI changes none of those.
        """
        for prefix in FLAT_PREFIXES:
            if layer.startswith(prefix):
                return self._find_flat(layer.removeprefix(prefix))
        for prefix in PREFIXES:
            layer = layer.removeprefix(prefix)
        return self._find_dotted(layer)

    def _find_dotted(self, layer: str) -> tuple[Target, ...]:
        name = renamed(f"{layer}{WEIGHT}", self.family)
        if name in self.shapes:
            return (Target(name),)
        own = renamed(layer, self.family)  # of a layer whose only tensor is no `weight` in the original layout
        if own.endswith(WEIGHT) and own in self.shapes:
            return (Target(own),)
        return self._find_fused(name.removesuffix(WEIGHT))

    def _find_fused(self, layer: str) -> tuple[Target, ...]:
        for fused in self.family.fused:
            if found := fused.match(layer, self.shapes):
                names = [f"{found.expand(part)}{WEIGHT}" for part, _ in fused.parts]
                if all(name in self.shapes for name in names):
                    spans = block_spans(fused.blocks, sum(self.shapes[name][0] for name in names))
                    blocks = [tuple(spans[block] for block in blocks) for _, blocks in fused.parts]
                    return tuple(Target(name, each) for name, each in zip(names, blocks, strict=True))
        return ()

    def _find_flat(self, layer: str) -> tuple[Target, ...]:
        own = self._flat.get(layer)
        if own is not None:
            return (Target(own),)
        alike = re.sub(r"\d+", "0", layer, count=1)  # a block may be missing here that others of its kind are not
        if alike not in self._dots:
            self._dots[alike] = self._reading(layer) or self._reading(alike)
        separators = self._dots[alike]
        return () if separators is None else self._find_dotted(_joined(layer.split("_"), separators))

    def _reading(self, layer: str) -> tuple[str, ...] | None:
        """Which underscores of a flat name were dots, so that the name is one of this model; None when none can be."""
        parts = layer.split("_")
        if len(parts) > MAX_UNDERSCORES:
            return None
        readings = product("._", repeat=len(parts) - 1)
        return next((each for each in readings if self._find_dotted(_joined(parts, each))), None)


def bias_of(target: Target, shapes: Shapes) -> Target | None:
    """The bias beside a weight, where there is one."""
    name = target.name.removesuffix(WEIGHT) + ".bias"
    return Target(name, target.rows) if name in shapes else None


def _joined(parts: list[str], separators: tuple[str, ...]) -> str:
    return "".join(part + separator for part, separator in zip(parts, (*separators, ""), strict=True))
