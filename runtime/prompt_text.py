"""A prompt as a conditioning that carries its text, for pipelines that encode it themselves.

Its embedding is `(1, bytes, 1)` uint8: a mark, and the text in UTF-8. Nodes that mix embeddings break the mark, so that
what they make is refused and never taken for a prompt.
"""

from __future__ import annotations

import torch

from .protocol import Conditioning

MARK = b"\x00text\x00"


def as_conditioning(text: str) -> Conditioning:
    """The conditioning that carries a text."""
    carried = torch.frombuffer(bytearray(MARK + text.encode()), dtype=torch.uint8)
    return Conditioning(embedding=carried.view(1, -1, 1))


def text_of(embedding: torch.Tensor) -> str | None:
    """The text that an embedding carries; None where it is one of a text encoder, or was changed on the way."""
    if embedding.dtype != torch.uint8 or embedding.ndim != 3 or embedding.shape[0] != 1 or embedding.shape[2] != 1:
        return None
    carried = bytes(embedding.flatten().tolist())
    if not carried.startswith(MARK) or carried.count(MARK) > 1:
        return None
    return carried.removeprefix(MARK).decode(errors="replace")
