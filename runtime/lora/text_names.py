"""The layer names of LoRA files -> the tensors of a text encoder that they mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .formats import TEXT_ENCODER
from .names import WEIGHT, Target


class TextNames:
    """`Names` of a text encoder, of which a model may have several: `place` counts them from 1, and `comfyui` is what
    ComfyUI calls this one.

    Files write its layers as its class does: with dots behind `text_encoder_2.` (diffusers) or
    `text_encoders.t5xxl.transformer.` (ComfyUI), with underscores behind `lora_te2_` (kohya, OneTrainer). The first may go
    without a number.
    """

    family = None

    def __init__(self, shapes: Mapping[str, torch.Size], *, title: str, comfyui: str, place: int = 1) -> None:
        self.title, self.shapes = title, shapes
        self._flat = {name.removesuffix(WEIGHT).replace(".", "_"): name for name in shapes if name.endswith(WEIGHT)}
        numbers = ("", "1") if place == 1 else (str(place),)
        self._flat_prefixes = tuple(f"lora_te{number}_" for number in numbers)
        dotted = tuple(f"text_encoder{number and '_'}{number}." for number in numbers)
        self._prefixes = (*dotted, f"text_encoders.{comfyui}.transformer.")

    def owns(self, layer: str) -> bool:
        """Whether it is a layer of a text encoder."""
        return TEXT_ENCODER.match(layer) is not None

    def find(self, layer: str) -> tuple[Target, ...]:
        """The weight that a layer of a file stands for; empty when this encoder has none."""
        for prefix in self._flat_prefixes:
            if name := self._flat.get(layer.removeprefix(prefix)) if layer.startswith(prefix) else None:
                return (Target(name),)
        for prefix in self._prefixes:
            name = f"{layer.removeprefix(prefix)}{WEIGHT}"
            if layer.startswith(prefix) and name in self.shapes:
                return (Target(name),)
        return ()
