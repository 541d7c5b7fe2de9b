"""Custom nodes for the tests: the text encoder of a small diffusers folder as a CLIP, for stock CLIP Text Encode, and a node
that runs out of memory.

The first stands in for stock Load CLIP, which knows encoders of the published sizes alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, UMT5EncoderModel

LENGTH = 32
"""Of the prompts that tiny-shapes was trained on."""


class TinyCLIP:
    """What CLIP Text Encode asks of a CLIP."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self._model = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()

    def tokenize(self, text: str) -> dict[str, torch.Tensor]:
        return self._tokenizer([text], padding="max_length", max_length=LENGTH, return_tensors="pt")

    def encode_from_tokens_scheduled(self, tokens: dict[str, torch.Tensor]) -> list[list[Any]]:
        mask = tokens["attention_mask"]
        hidden = self._model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
        return [[hidden * mask.unsqueeze(-1), {}]]


class TinyCLIPLoader:
    """A diffusers folder to CLIP."""

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"folder": ("STRING", {})}}

    def load(self, folder: str) -> tuple[TinyCLIP]:
        return (TinyCLIP(Path(folder)),)


class RunsOut:
    """Runs out of memory, as a model of ComfyUI's own would."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"latent": ("LATENT",)}}

    def run(self, latent: dict[str, Any]) -> tuple:
        raise torch.OutOfMemoryError("no memory left")


NODE_CLASS_MAPPINGS = {"TinyCLIPLoader": TinyCLIPLoader, "RunsOut": RunsOut}
