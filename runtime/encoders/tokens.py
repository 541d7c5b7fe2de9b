"""Text as the numbers of words that an encoder knows: by a tokenizer's folder, or by the model of one inside a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from ..errors import Refused

END, PADDING = 1, 0
"""What T5 and UMT5 have after a text, and after its end."""
LONGEST = 1 << 20


@dataclass(frozen=True)
class Tokenizer:
    """`ids` of a text, of `words` there are, without the `start` and `end` that stand around it (None: it has none); texts
    are filled up with `padding`, to `length` at most.
    """

    ids: Callable[[str], list[int]]
    words: int
    padding: int
    start: int | None = None
    end: int | None = None
    length: int = LONGEST

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        kind: str = "AutoTokenizer",
        padding: int | None = None,
        starts: bool = False,
        ends: bool = True,
    ) -> Tokenizer:
        """One of transformers, of the class `kind`, which puts its start and end around a text where it `starts` and `ends`.

        Raises `Refused` when it cannot be loaded.
        """
        try:
            tokenizer = getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
            around = _ids(tokenizer, "")
            if len(around) != starts + ends:
                raise ValueError(f"an empty text has {len(around)} tokens, not {starts + ends}")
        except Exception as error:  # what `tokenizers` raises on a damaged file is an Exception and nothing narrower
            raise Refused(f"{folder} holds no tokenizer that can be loaded ({error}): download it again") from error
        return cls(
            lambda text: _ids(tokenizer, text)[starts : -1 if ends else None],
            words=len(tokenizer),
            padding=tokenizer.pad_token_id if padding is None else padding,
            start=around[0] if starts else None,
            end=around[-1] if ends else None,
            length=min(LONGEST, tokenizer.model_max_length) if padding is None else LONGEST,
        )

    @classmethod
    def from_pieces(cls, model: bytes, *, where: Path, start: int | None = None, end: int | None = END) -> Tokenizer:
        """One of SentencePiece (Kudo & Richardson 2018, arXiv:1808.06226), by its model. Raises `Refused`."""
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise Refused(
                f"the tokenizer inside {where} needs the package sentencepiece, which ComfyUI lists too: install it"
            ) from error
        try:
            pieces = SentencePieceProcessor(model_proto=model)
        except (RuntimeError, TypeError) as error:
            raise Refused(f"{where} is damaged: the tokenizer inside cannot be read. Download it again") from error
        return cls(pieces.encode, words=pieces.get_piece_size(), padding=PADDING, start=start, end=end)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer([text]).input_ids[0]
