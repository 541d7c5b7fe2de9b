"""Prompt -> conditioning, by the UMT5 encoder of a model folder or of a single file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import UMT5Config, UMT5EncoderModel
from transformers.utils.logging import disable_progress_bar

from ..configuration import load_folder
from ..errors import Refused
from ..inspection import read_json
from ..lora.apply import Loras
from ..progress import ReportProgress
from ..protocol import Conditioning
from ..settings import LoraSettings
from .reporting import reporting
from .text_file import load_text_file
from .text_loras import loras_of
from .text_split import load_split
from .tokens import Tokenizer

STAGE = "encoding text"
TITLE, COMFYUI_NAME = "the text encoder UMT5", "umt5xxl"
MOST_TOKENS = 4096
"""Of a prompt; eight times what the models were trained on. Attention's memory grows with the square."""


class TextEncoder:
    """A text encoder that `stays` on a device, or visits it from host memory for each prompt.

    It is whole on one rank, or cut over the ranks of a group, which then make the same calls with the same values.
    """

    def __init__(self, tokenizer: Tokenizer, model: UMT5EncoderModel, *, device: torch.device, stays: bool) -> None:
        self.model = model
        self._tokenizer, self._device = tokenizer, device
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
        """From the folders of the encoder and its tokenizer, or a file of both; cut over the ranks of a group, where one is given.

        Raises `Refused` when they do not hold what they should.
        """
        if folder.is_file():
            model, words = load_text_file(folder, length=length, dtype=dtype, group=group)
        else:
            model, words = _model(folder, dtype=dtype, group=group), Tokenizer.from_folder(tokenizer, length=length)
        if words.words > model.config.vocab_size:
            raise Refused(
                f"{tokenizer} has {words.words} words, but the encoder {folder} knows {model.config.vocab_size}: use the two "
                f"of one model"
            )
        return cls(words, model.eval().requires_grad_(False), device=device, stays=stays)

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
        words = self._tokenizer.ids(text)
        if len(words) > MOST_TOKENS:
            raise Refused(f"the prompt has {len(words)} tokens: shorten it to {MOST_TOKENS} or less")
        filling = max(0, self._tokenizer.length - len(words))
        ids = torch.tensor([words + [self._tokenizer.padding] * filling], device=self._device)
        mask = torch.tensor([[1] * len(words) + [0] * filling], device=self._device)
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
