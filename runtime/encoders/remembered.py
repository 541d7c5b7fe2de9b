"""What became of the prompts encoded last, so that one asked for again is not encoded again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable

from ..message import Conditioning


class RememberedPrompts:
    """Conditioning by encoder and prompt: of those used last as many as `limit` bytes hold. No prompt is kept, only its
    digest.

    Ranks that share an encoder remember and forget alike, as they encode the same prompts; those that do not `keep` the
    results have nothing but their sizes.
    """

    def __init__(self, limit: int, *, keep: bool = True) -> None:
        self._limit, self._keep = limit, keep
        self._entries: OrderedDict[bytes, tuple[int, Conditioning | None]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """What is remembered takes, on the ranks that keep it."""
        return sum(nbytes for nbytes, _ in self._entries.values())

    def recall(self, encoder: Hashable, text: str, encode: Callable[[], Conditioning]) -> Conditioning | None:
        """What `encode()` gives, or gave for this encoder and prompt; None for a prompt asked for again on a rank that does
        not keep it.
        """
        key = hashlib.blake2b(repr((encoder, text)).encode(errors="surrogatepass")).digest()
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][1]
        conditioning = encode()
        nbytes = sum(tensor.nbytes for tensor in conditioning.tensors().values())
        if nbytes <= self._limit:
            self._entries[key] = (nbytes, conditioning if self._keep else None)
            while self.nbytes > self._limit:
                self._entries.popitem(last=False)
        return conditioning
