"""The parts of a model: where they are, and what cannot be used together, found out before a weight is read."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import Refused
from .facts import ModelFacts
from .settings import FROM_MODEL, MemorySettings, ModelSettings
from .stored import converted


def check_parts(settings: ModelSettings) -> None:
    """Raise `Refused` for a part that this version cannot use."""
    if settings.text_encoder_2 != FROM_MODEL:
        raise Refused(
            "text_encoder_2 is set, but no model with two text encoders reads them yet: leave it at 'from model'"
        )
    if settings.text_encoder != FROM_MODEL and not os.path.exists(settings.text_encoder):
        raise Refused(
            f"{settings.text_encoder}: no such text encoder. Choose a umt5_xxl file or a diffusers text_encoder folder, or use "
            f"a CLIP Loader (type wan) and CLIP Text Encode"
        )
    if settings.vae != FROM_MODEL and not os.path.exists(settings.vae):
        raise Refused(f"{settings.vae}: no such VAE. Choose a file or folder that is there")


def text_encoder_of(settings: ModelSettings, facts: ModelFacts) -> tuple[Path, Path]:
    """Where text encoder and tokenizer are. Raises `Refused` when there are none."""
    if facts.spec.text_encoders:
        raise Refused(f"{facts.spec.title} takes {facts.spec.text_encoders}")
    folder, tokenizer = facts.text_encoder, facts.tokenizer
    if settings.text_encoder != FROM_MODEL:
        folder = Path(settings.text_encoder)
        places = (folder,) if folder.is_file() else (folder.parent / "tokenizer", folder)
        tokenizer = next((path for path in places if path.exists()), None)
    if folder is None or tokenizer is None:
        raise Refused(
            f"{facts.name} comes without a text encoder: use a CLIP Loader (type wan) and CLIP Text Encode, or choose a "
            f"umt5_xxl file or the text_encoder folder of a diffusers model in Load Model (--text-encoder)"
        )
    return folder, tokenizer


def vae_of(settings: ModelSettings, facts: ModelFacts) -> Path:
    """Where the VAE is. Raises `Refused` when there is none."""
    path = facts.vae if settings.vae == FROM_MODEL else Path(settings.vae)
    if path is None:
        raise Refused(
            f"{facts.name} comes without a VAE: use a VAE Loader with VAE Decode or VAE Encode, or choose a VAE in Load "
            f"Model (--vae)"
        )
    return path


def check_offload(facts: ModelFacts, memory: MemorySettings) -> None:
    """Raise `Refused` where weights are to be streamed from a file that does not have them as they are used."""
    if memory.offload != "disk":
        return
    if not facts.sources:
        raise Refused(f"offload disk: {facts.name} has random weights, which are in no file: choose offload layerwise")
    name = next((name for each in facts.experts for name, stored in each.stored.items() if converted(stored)), None)
    if name is not None:
        raise Refused(
            f"offload disk reads the weights of {facts.name} as its file has them, but {name} is converted when it is "
            f"loaded: choose offload layerwise"
        )
