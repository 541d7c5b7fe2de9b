"""What became of the prompts encoded last, so that one asked for again is not encoded again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable

from ..message import Conditioning


class RememberedPrompts:
    """Conditioning by encoder and prompt: of those used last as many as `limit` bytes hold. No prompt is kept, only its
    digest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, Conditioning] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """What is remembered takes."""
        return sum(map(_bytes_of, self._entries.values()))

    def get(self, encoder: Hashable, text: str) -> Conditioning | None:
        """What this encoder made of this prompt; None where that is not remembered."""
        key = _digest(encoder, text)
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, encoder: Hashable, text: str, conditioning: Conditioning) -> None:
        """Remember it, and forget what was used longest ago. What is over the limit by itself is not remembered."""
        if _bytes_of(conditioning) > self._limit:
            return
        self._entries[_digest(encoder, text)] = conditioning
        while self.nbytes > self._limit:
            self._entries.popitem(last=False)


def _digest(encoder: Hashable, text: str) -> bytes:
    return hashlib.blake2b(repr((encoder, text)).encode(errors="surrogatepass")).digest()


def _bytes_of(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in conditioning.tensors().values())
