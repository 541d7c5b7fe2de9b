"""Text as the numbers of words that an encoder knows: by a tokenizer's folder, or by the model of one inside a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from ..errors import Refused

END, PADDING = 1, 0
"""What T5 and UMT5 have after a text, and after its end."""


@dataclass(frozen=True)
class Tokenizer:
    """`ids` of a text with its end, of `words` there are; texts are filled up with `padding` to `length`."""

    ids: Callable[[str], list[int]]
    words: int
    padding: int
    length: int

    @classmethod
    def from_folder(cls, folder: Path, *, length: int) -> Tokenizer:
        """One of transformers. Raises `Refused` when it cannot be loaded."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            length = min(length, tokenizer.model_max_length)
            tokenizer([""], padding="max_length", max_length=length)
        except Exception as error:  # what `tokenizers` raises on a damaged file is an Exception and nothing narrower
            raise Refused(f"{folder} holds no tokenizer that can be loaded ({error}): download it again") from error
        return cls(lambda text: tokenizer([text]).input_ids[0], len(tokenizer), tokenizer.pad_token_id, length)

    @classmethod
    def from_pieces(cls, model: bytes, *, length: int, where: Path) -> Tokenizer:
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
        return cls(lambda text: [*pieces.encode(text), END], pieces.get_piece_size(), PADDING, length)
