"""What cannot be used together, found out before a weight is read: the parts of a model, and where its weights lie."""

from __future__ import annotations

import os

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
