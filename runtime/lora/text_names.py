"""The layer names of LoRA files -> the tensors of the text encoders that they mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .formats import TEXT_ENCODER
from .names import WEIGHT, Target


class TextNames:
    """`Names` of a text encoder, of which a model may have several: `places` are the numbers of this one, counted from
    1, and `comfyui` is what ComfyUI calls it. `outer` stands before the names of its class in some files and versions.

    Files write its layers as its class does: with dots behind `text_encoder_2.` (diffusers) or
    `text_encoders.t5xxl.transformer.` (ComfyUI; newer ones without the name too), with underscores behind `lora_te2_`
    (kohya, OneTrainer). The first may go without a number.
    """

    family = None

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        *,
        title: str,
        comfyui: str,
        places: tuple[int, ...] = (1,),
        outer: str = "",
    ) -> None:
        self.title, self.shapes = title, shapes
        inner = {name.removesuffix(WEIGHT).removeprefix(outer): name for name in shapes if name.endswith(WEIGHT)}
        self._layers = {f"{start}{layer}": name for layer, name in inner.items() for start in ("", outer)}
        self._flat = {layer.replace(".", "_"): name for layer, name in self._layers.items()}
        numbers = [number for place in places for number in (("", "1") if place == 1 else (str(place),))]
        self._flat_prefixes = tuple(f"lora_te{number}_" for number in numbers)
        dotted = tuple(f"text_encoder{number and '_'}{number}." for number in numbers)
        unnamed = () if comfyui.startswith("clip_") else ("text_encoders.transformer.",)
        self._prefixes = (*dotted, f"text_encoders.{comfyui}.transformer.", *unnamed)

    def owns(self, layer: str) -> bool:
        """Whether it is a layer of a text encoder."""
        return TEXT_ENCODER.match(layer) is not None

    def find(self, layer: str) -> tuple[Target, ...]:
        """The weight that a layer of a file stands for; empty when this encoder has none."""
        for prefixes, layers in ((self._flat_prefixes, self._flat), (self._prefixes, self._layers)):
            for prefix in prefixes:
                if layer.startswith(prefix) and (name := layers.get(layer.removeprefix(prefix))):
                    return (Target(name),)
        return ()


class JoinedTextNames:
    """`Names` of several encoders in one module, by what each is called there."""

    family = None

    def __init__(self, shapes: Mapping[str, torch.Size], encoders: Mapping[str, TextNames], *, title: str) -> None:
        self.title, self.shapes, self._encoders = title, shapes, encoders

    def owns(self, layer: str) -> bool:
        """Whether it is a layer of a text encoder."""
        return TEXT_ENCODER.match(layer) is not None

    def find(self, layer: str) -> tuple[Target, ...]:
        """The weight that a layer of a file stands for; empty when no encoder has it."""
        for place, names in self._encoders.items():
            if found := names.find(layer):
                return tuple(target._replace(name=f"{place}.{target.name}") for target in found)
        return ()
