"""Prompt -> conditioning, by the UMT5 encoder of a model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, UMT5EncoderModel
from transformers.utils.logging import disable_progress_bar

from ..errors import Refused
from ..inspection import read_json
from ..progress import ReportProgress
from ..protocol import Conditioning

STAGE = "encoding text"


class TextEncoder:
    """A text encoder that stays in host memory and visits `device` for each prompt."""

    def __init__(self, tokenizer: AutoTokenizer, model: UMT5EncoderModel, *, length: int, device: torch.device) -> None:
        self._tokenizer, self._model, self._device = tokenizer, model, device
        self._length = min(length, tokenizer.model_max_length)

    @classmethod
    def load(
        cls, folder: Path, tokenizer: Path, *, length: int, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        """From the folders of the encoder and its tokenizer. Raises `Refused` when they do not hold what they should."""
        model = _model(folder, dtype=dtype)
        try:
            words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        except (OSError, ValueError) as error:
            raise Refused(f"{tokenizer} holds no tokenizer that can be loaded: {error}") from error
        return cls(words, model.eval().requires_grad_(False), length=length, device=device)

    @torch.inference_mode()
    def encode(self, text: str, *, progress: ReportProgress) -> Conditioning:
        """`(1, L, D)` float32 on the CPU, zero where the prompt has ended; L grows with prompts over the usual length."""
        progress(STAGE, 0, 1, together=False)
        tokens = self._tokenizer([text], return_tensors="pt", return_attention_mask=True)
        length = max(self._length, tokens.input_ids.shape[1])
        tokens = self._tokenizer.pad(tokens, padding="max_length", max_length=length, return_tensors="pt")
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        self._model.to(self._device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        embedding = (hidden.float() * mask.unsqueeze(-1)).cpu()
        self._model.to("cpu")
        progress(STAGE, 1, 1, together=False)
        return Conditioning(embedding=embedding)


def _model(folder: Path, *, dtype: torch.dtype) -> UMT5EncoderModel:
    wanted = UMT5EncoderModel.__name__
    kinds = read_json(folder / "config.json").get("architectures") or ["nothing"]
    if wanted not in kinds:
        raise Refused(f"{folder} holds {kinds[0]}, but the text encoder must be a {wanted}")
    disable_progress_bar()
    try:
        model, report = UMT5EncoderModel.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise Refused(f"{folder} holds no text encoder that can be loaded: {error}") from error
    if report["missing_keys"]:
        raise Refused(f"{folder} lacks {', '.join(sorted(report['missing_keys'])[:5])}: download it again")
    return model
