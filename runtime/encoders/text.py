"""Prompt -> conditioning, by the text encoders of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..errors import Refused
from ..families.texts import JOINED_WIDTH
from ..lora.apply import Loras
from ..progress import ReportProgress
from ..protocol import Conditioning
from ..settings import LoraSettings
from ..text_files import KINDS, TextPart
from .kinds import blocks_of
from .prompt_encoder import Encoded, PromptEncoder
from .reporting import reporting
from .text_file import load_encoder, load_tokenizer
from .text_loras import loras_of
from .tokens import Tokenizer
from .umt5_folder import load_umt5

STAGE = "encoding text"


class TextEncoder:
    """A model's text encoders, which `stay` on a device, or visit it from host memory for each prompt.

    Each is whole on one rank, or cut over the ranks of a group, which then make the same calls with the same values.
    `model` has them by kind.
    """

    def __init__(
        self, encoders: Sequence[PromptEncoder], model: nn.ModuleDict, *, device: torch.device, stays: bool
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._encoders, self._device = tuple(encoders), device
        self._stays = stays
        self._loras: Loras | None = None

    @classmethod
    def load(
        cls,
        parts: Sequence[TextPart],
        *,
        dtype: torch.dtype,
        device: torch.device,
        stays: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> TextEncoder:
        """From the files of the encoders and their tokenizers; cut over the ranks of a group, where one is given.

        Raises `Refused` when they do not hold what they should.
        """
        model = nn.ModuleDict({part.use.kind: _model(part, dtype=dtype, group=group) for part in parts})
        encoders = [PromptEncoder(part.use, _tokenizer(part, model[part.use.kind])) for part in parts]
        return cls(encoders, model, device=device, stays=stays)

    @torch.inference_mode()
    def use_loras(self, loras: Iterable[LoraSettings]) -> tuple[str, ...]:
        """Encode with the parts of these that are for a text encoder, and no others; a line to tell of each. Raises `Refused`."""
        chosen = tuple(loras)
        if self._loras is None and chosen:
            self._loras = loras_of(self.model, device=self._device)
        return () if self._loras is None else self._loras.use(chosen)

    @torch.inference_mode()
    def encode(self, text: str, *, progress: ReportProgress) -> Conditioning:
        """`(1, L, D)` float32 on the CPU, and what else the family reads of a prompt; L grows with prompts over the usual length.

        Raises `Refused` for a prompt that is too long and for what is no longer numbers, on each rank of the group; `Cancelled`
        when the job is stopped between two blocks.
        """
        prompts = [encoder.read(text) for encoder in self._encoders]
        blocks = [block for kind, model in self.model.items() for block in blocks_of(model, kind)]
        progress(STAGE, 0, len(blocks))
        with self._on_device(), reporting(blocks, partial(progress, STAGE)):
            encoded = [
                encoder.encode(prompt, self.model[encoder.use.kind], device=self._device)
                for encoder, prompt in zip(self._encoders, prompts, strict=True)
            ]
        for encoder, each in zip(self._encoders, encoded, strict=True):
            _check_finite(each, KINDS[encoder.use.kind].title)
        return _joined(encoded)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self.model.to(self._device)
        try:
            yield
        finally:
            if not self._stays:
                self.model.to("cpu")


def _check_finite(encoded: Encoded, title: str) -> None:
    if not all(tensor.isfinite().all() for tensor in encoded if tensor is not None):
        raise Refused(
            f"the text encoder {title} gave numbers that are not finite (nan or inf), a black picture: its file is damaged, or a "
            f"LoRA on it or the weight of a word is too strong"
        )


def _joined(encoded: Sequence[Encoded]) -> Conditioning:
    """The conditioning of what each encoder gives: tokens that come with a pooled prompt stand side by side, others behind them."""
    beside = [each.tokens for each in encoded if each.tokens is not None and each.pooled is not None]
    behind = [each for each in encoded if each.tokens is not None and each.pooled is None]
    pooled = [each.pooled for each in encoded if each.pooled is not None]
    tokens = [each.tokens for each in behind]
    if beside:
        shortest = min(each.shape[1] for each in beside)
        together = torch.cat([each[:, :shortest] for each in beside], dim=-1)
        tokens.insert(0, F.pad(together, (0, JOINED_WIDTH - together.shape[-1])))
    return Conditioning(
        embedding=torch.cat(tokens, dim=1),
        pooled=torch.cat(pooled, dim=-1) if pooled else None,
        attention_mask=None if beside else behind[0].mask,
    )


def _model(part: TextPart, *, dtype: torch.dtype, group: dist.ProcessGroup | None) -> nn.Module:
    if part.file.path.is_dir() and part.file.kind == "umt5xxl":
        return load_umt5(part.file.path, dtype=dtype, group=group)
    return load_encoder(part.file, dtype=dtype, group=group)


def _tokenizer(part: TextPart, model: nn.Module) -> Tokenizer:
    tokenizer, known = load_tokenizer(part), model.config.vocab_size
    if tokenizer.words > known:
        raise Refused(
            f"{part.tokenizer or part.file.path} has {tokenizer.words} words, but the encoder {part.file.path} knows {known}: use "
            f"the two of one model"
        )
    return tokenizer
