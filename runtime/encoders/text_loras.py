"""The parts of LoRA files that are for a text encoder, as ComfyUI's LoraLoader puts them on its CLIP."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from ..linear import ParallelEmbedding
from ..lora.apply import Loras
from ..lora.text_names import TextNames
from ..settings import LoraSettings


def loras_of(model: nn.Module, *, title: str, comfyui: str, dtype: torch.dtype, device: torch.device) -> Loras:
    """What takes LoRAs for an encoder on a device, whole or cut; `comfyui` is what ComfyUI calls it. Its words stay as they are."""
    words = tuple(name for name, each in model.named_modules() if isinstance(each, nn.Embedding | ParallelEmbedding))
    shapes = {name: each.shape for name, each in model.named_parameters() if not name.startswith(words)}
    names = partial(TextNames, title=title, comfyui=comfyui)
    return Loras(model, names, shapes=shapes, dtype=dtype, device=device)


def for_text(loras: Iterable[LoraSettings]) -> tuple[LoraSettings, ...]:
    """The same files at the strength that they have for text, without those that are off there."""
    strengths = ((lora, lora.strength if lora.strength_clip is None else lora.strength_clip) for lora in loras)
    return tuple(lora.model_copy(update={"strength": each, "fuse": False}) for lora, each in strengths if each)
