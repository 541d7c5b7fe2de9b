"""The parts of a model: where they are, and what cannot be used together, found out before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import Refused
from .facts import ModelFacts
from .families.spec import FamilySpec
from .settings import FROM_MODEL, MemorySettings, ModelSettings
from .stored import converted
from .text_files import KINDS, EncoderFile, TextPart, find_encoders, tokenizer_of

FOLDER = "the text_encoder folder of a diffusers model in Load Model (--text-encoder)"


def check_parts(settings: ModelSettings, family: FamilySpec) -> None:
    """Raise `Refused` for a part that is not there, or that a family has no use for."""
    for number, path in enumerate((settings.text_encoder_2, settings.text_encoder_3), start=2):
        if path != FROM_MODEL and len(family.texts) < number:
            raise Refused(
                f"text_encoder_{number} is set, but {family.title} is run with {len(family.texts) or 'no'} text encoder"
                f"{'s' if len(family.texts) > 1 else ''} here: leave it at '{FROM_MODEL}'"
            )
    for path in _chosen(settings):
        if not os.path.exists(path):
            raise Refused(
                f"{path}: no such text encoder. Choose {_examples(family)}a diffusers text_encoder folder, or take the prompt from "
                f"elsewhere: {family.text_encoders}"
            )
    if settings.vae != FROM_MODEL and not os.path.exists(settings.vae):
        raise Refused(f"{settings.vae}: no such VAE. Choose a file or folder that is there")


def text_parts_of(settings: ModelSettings, facts: ModelFacts) -> tuple[TextPart, ...]:
    """Where a model's text encoders and their tokenizers are. Raises `Refused` for one that is missing, or of another kind."""
    family = facts.spec
    if not family.texts:
        raise Refused(f"{family.title} takes {family.text_encoders}")
    held: dict[str, EncoderFile] = {}
    for path in _chosen(settings):
        _add_chosen(held, path, family)
    for path in facts.text_encoders:
        held = find_encoders(path) | held
    lacking = [use.kind for use in family.texts if use.kind not in held and not use.optional]
    if lacking:
        raise Refused(_lacks(facts, lacking, held))
    return tuple(
        TextPart(use, held[use.kind], tokenizer_of(held[use.kind], settings.tokenizers))
        for use in family.texts
        if use.kind in held
    )


def _chosen(settings: ModelSettings) -> list[Path]:
    return [
        Path(each)
        for each in (settings.text_encoder, settings.text_encoder_2, settings.text_encoder_3)
        if each != FROM_MODEL
    ]


def _add_chosen(held: dict[str, EncoderFile], path: Path, family: FamilySpec) -> None:
    """Add the encoders of a chosen file that a family takes."""
    found = find_encoders(path)
    taken = [use.kind for use in family.texts if use.kind in found]
    if not taken:
        titles = " and ".join(each.title for each in found.values())
        raise Refused(
            f"{path} is {titles}, but {family.title} takes {family.text_encoders}, or choose {_examples(family)}{FOLDER}"
        )
    for kind in taken:
        if kind in held:
            raise Refused(f"{held[kind].path} and {path} are both {found[kind].title}: choose one of each kind")
        held[kind] = found[kind]


def _lacks(facts: ModelFacts, lacking: list[str], held: Mapping[str, EncoderFile]) -> str:
    titles = " and ".join(KINDS[kind].title for kind in lacking)
    what = f"without the text encoder {titles}" if held else "without a text encoder"
    return (
        f"{facts.name} comes {what}. {facts.spec.title} takes {facts.spec.text_encoders}, or choose "
        f"{_examples(facts.spec, lacking)}{FOLDER}"
    )


def _examples(family: FamilySpec, kinds: Iterable[str] = ()) -> str:
    """Names of files to choose, in words, with what goes on behind them."""
    names = [KINDS[use.kind].example for use in family.texts if not kinds or use.kind in kinds]
    return f"{' and '.join(names)} files or " if names else ""


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
