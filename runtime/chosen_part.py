"""The parts of a model beside its transformer, as settings choose them."""

from __future__ import annotations

from typing import Literal

from .settings import ModelSettings, Settings

TEXT_ENCODER, VAE = "text encoder", "vae"
PartKind = Literal["text encoder", "vae"]


class ChosenPart(Settings):
    """The text encoders, or the VAE: what they are read from, and their place. What was read for one is used for its equal."""

    kind: PartKind
    files: tuple[str, ...]
    place: str

    @classmethod
    def of(cls, kind: PartKind, model: ModelSettings) -> ChosenPart:
        """The part of this kind that the settings of a model choose."""
        if kind == VAE:
            return cls(kind=kind, files=(model.vae,), place=model.memory.vae_device)
        files = model.text_encoder, model.text_encoder_2, model.text_encoder_3, model.tokenizers
        return cls(kind=kind, files=files, place=model.memory.text_encoder_device)
