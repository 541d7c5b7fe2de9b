"""The parts of LoRA files that are for a text encoder, as ComfyUI's LoraLoader puts them on its CLIP."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..linear import ParallelEmbedding
from ..lora.apply import Loras
from ..lora.formats import TEXT_ENCODER
from ..lora.text_names import TextNames
from ..safetensors_header import read_header
from ..settings import LoraSettings


def loras_of(model: nn.Module, *, title: str, comfyui: str, dtype: torch.dtype, device: torch.device) -> Loras:
    """What takes LoRAs for an encoder on a device, whole or cut; `comfyui` is what ComfyUI calls it. Its words stay as they are."""
    words = tuple(name for name, each in model.named_modules() if isinstance(each, nn.Embedding | ParallelEmbedding))
    shapes = {name: each.shape for name, each in model.named_parameters() if not name.startswith(words)}
    names = partial(TextNames, title=title, comfyui=comfyui)
    return Loras(model, names, shapes=shapes, dtype=dtype, device=device)


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
