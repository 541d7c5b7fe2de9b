"""Prompt -> conditioning, by the UMT5 encoder of a model folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel
from transformers.utils.logging import disable_progress_bar

from ..configuration import load_folder
from ..errors import Refused
from ..inspection import read_json
from ..lora.apply import Loras
from ..progress import ReportProgress
from ..protocol import Conditioning
from ..settings import LoraSettings
from .reporting import reporting
from .text_loras import loras_of
from .text_split import load_split

STAGE = "encoding text"
TITLE, COMFYUI_NAME = "the text encoder UMT5", "umt5xxl"
MOST_TOKENS = 4096
"""Of a prompt; eight times what the models were trained on. Attention's memory grows with the square."""


class TextEncoder:
    """A text encoder that `stays` on a device, or visits it from host memory for each prompt.

    It is whole on one rank, or cut over the ranks of a group, which then make the same calls with the same values.
    """

    def __init__(
        self, tokenizer: AutoTokenizer, model: UMT5EncoderModel, *, length: int, device: torch.device, stays: bool
    ) -> None:
        self.model = model
        self._tokenizer, self._device, self._length = tokenizer, device, length
        self._stays = stays
        self._loras: Loras | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: Path,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        stays: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> TextEncoder:
        """From the folders of the encoder and its tokenizer; cut over the ranks of a group, where one is given.

        Raises `Refused` when they do not hold what they should.
        """
        model = _model(folder, dtype=dtype, group=group)
        words, length = _tokenizer(tokenizer, length=length)
        if len(words) > model.config.vocab_size:
            raise Refused(
                f"{tokenizer} has {len(words)} words, but the encoder {folder} knows {model.config.vocab_size}: use the two "
                f"of one model"
            )
        return cls(words, model.eval().requires_grad_(False), length=length, device=device, stays=stays)

    @torch.inference_mode()
    def use_loras(self, loras: Iterable[LoraSettings]) -> tuple[str, ...]:
        """Encode with the parts of these that are for a text encoder, and no others; a line to tell of each. Raises `Refused`."""
        chosen = tuple(loras)
        if self._loras is None and chosen:
            kind = {"title": TITLE, "comfyui": COMFYUI_NAME, "dtype": self.model.dtype, "device": self._device}
            self._loras = loras_of(self.model, **kind)
        return () if self._loras is None else self._loras.use(chosen)

    @torch.inference_mode()
    def encode(self, text: str, *, progress: ReportProgress) -> Conditioning:
        """`(1, L, D)` float32 on the CPU, zero where the prompt has ended; L grows with prompts over the usual length.

        Raises `Refused` for a prompt that is too long, `Cancelled` when the job is stopped between two blocks.
        """
        tokens = self._tokenizer([text], return_tensors="pt", return_attention_mask=True)
        count = tokens.input_ids.shape[1]
        if count > MOST_TOKENS:
            raise Refused(f"the prompt has {count} tokens: shorten it to {MOST_TOKENS} or less")
        tokens = self._tokenizer.pad(
            tokens, padding="max_length", max_length=max(self._length, count), return_tensors="pt"
        )
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        blocks = self.model.encoder.block
        progress(STAGE, 0, len(blocks))
        with self._on_device(), reporting(blocks, partial(progress, STAGE)):
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return Conditioning(embedding=(hidden.float() * mask.unsqueeze(-1)).cpu())

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self.model.to(self._device)
        try:
            yield
        finally:
            if not self._stays:
                self.model.to("cpu")


def _tokenizer(folder: Path, *, length: int) -> tuple[AutoTokenizer, int]:
    """The tokenizer, and to how many tokens it fills a prompt up: `length` at most."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        length = min(length, tokenizer.model_max_length)
        tokenizer([""], padding="max_length", max_length=length)
    except Exception as error:  # what `tokenizers` raises on a damaged file is an Exception and nothing narrower
        raise Refused(f"{folder} holds no tokenizer that can be loaded ({error}): download it again") from error
    return tokenizer, length


def _model(folder: Path, *, dtype: torch.dtype, group: dist.ProcessGroup | None) -> UMT5EncoderModel:
    wanted, kinds = UMT5EncoderModel.__name__, read_json(folder / "config.json").get("architectures")
    if not isinstance(kinds, list) or wanted not in kinds:
        raise Refused(f"{folder} holds {kinds or 'nothing'}, but the text encoder must be a {wanted}")
    if group is not None:
        return load_split(folder, build=_without_weights, dtype=dtype, group=group)
    disable_progress_bar()
    return load_folder(UMT5EncoderModel, folder, build=_without_weights, dtype=dtype)


def _without_weights(config: dict[str, Any]) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config.from_dict(config))
