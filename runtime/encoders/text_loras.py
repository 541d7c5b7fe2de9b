"""The parts of LoRA files that are for a text encoder, as ComfyUI's LoraLoader puts them on its CLIP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..checkpoint import Shapes
from ..linear import ParallelEmbedding
from ..lora.apply import Loras
from ..lora.formats import TEXT_ENCODER
from ..lora.text_names import JoinedTextNames, TextNames
from ..safetensors_header import read_header
from ..settings import LoraSettings
from ..text_files import KINDS


def loras_of(model: nn.ModuleDict, *, device: torch.device) -> Loras:
    """What takes LoRAs for the encoders of a model, by kind, on a device, whole or cut. Their words stay as they are."""
    words = tuple(name for name, each in model.named_modules() if isinstance(each, nn.Embedding | ParallelEmbedding))
    shapes = {name: each.shape for name, each in model.named_parameters() if not name.startswith(words)}
    return Loras(
        model, partial(text_names, tuple(model)), shapes=shapes, dtype=next(model.parameters()).dtype, device=device
    )


def text_names(kinds: Sequence[str], shapes: Shapes) -> JoinedTextNames:
    """What LoRA files call the layers of these encoders, which are in one module by kind."""
    titles = [KINDS[kind].title for kind in kinds]
    encoders = {
        kind: TextNames(
            {name.removeprefix(f"{kind}."): shape for name, shape in shapes.items() if name.startswith(f"{kind}.")},
            title=titles[place - 1], comfyui=kind, places=_places(kind, place), outer=KINDS[kind].outer,
        )
        for place, kind in enumerate(kinds, start=1)
    }  # fmt: skip
    return JoinedTextNames(shapes, encoders, title=f"the text encoder{'s'[: len(kinds) > 1]} {' and '.join(titles)}")


def _places(kind: str, place: int) -> tuple[int, ...]:
    """The numbers of an encoder in files: T5 beside CLIP-L has that of the third as well, which it is in SD3."""
    return (place, 3) if (kind, place) == ("t5xxl", 2) else (place,)


def for_text(loras: Iterable[LoraSettings]) -> tuple[LoraSettings, ...]:
    """The same files at the strength that they have for text, without those that are off or have nothing there: whose
    strengths encode no prompt anew.
    """
    strengths = ((lora, lora.strength if lora.strength_clip is None else lora.strength_clip) for lora in loras)
    chosen = ((lora, strength) for lora, strength in strengths if strength and _has_text(Path(lora.path)))
    return tuple(lora.model_copy(update={"strength": strength, "fuse": False}) for lora, strength in chosen)


def _has_text(path: Path) -> bool:
    try:
        return any(map(TEXT_ENCODER.match, read_header(path)))
    except (OSError, ValueError):
        return True  # to be refused where it is read
