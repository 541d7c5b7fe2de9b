"""One rank's part of a tensor, any of its bytes of which can be had: from host memory, or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..parallel.shares import Cut, RowsOf
from .tensor_file import CHUNK_BYTES, StoredTensor

Rows = tuple[slice, ...]


class Part(Protocol):
    """The bytes of a tensor."""

    def announce(self, start: int, nbytes: int) -> None:
        """Say that these are read next."""

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill a buffer of bytes on the CPU from one of its bytes on."""


class MemoryPart:
    """A tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = bytes_of(tensor)

    def announce(self, start: int, nbytes: int) -> None:
        """It is there."""

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Copy from one of its bytes on."""
        buffer.copy_(self._bytes[start : start + len(buffer)])


class SpanPart:
    """Rows of a stored tensor that lie together there, in the number format in which they are used."""

    def __init__(self, stored: StoredTensor, start: int) -> None:
        self._stored, self._start = stored, start

    def announce(self, start: int, nbytes: int) -> None:
        """Have the system read them ahead."""
        self._stored.announce(self._start + start, nbytes)

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Read straight into the buffer."""
        self._stored.read_into(buffer, self._start + start)


class MadePart:
    """What is put together or converted from what is stored, some rows at a time; `rows(start, stop)` gives those."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, rows: Callable[[int, int], torch.Tensor]) -> None:
        self._count = shape[0] if shape else 1
        self._row_bytes = shape.numel() * dtype.itemsize // max(1, self._count)
        self._dtype, self._rows = dtype, rows

    def announce(self, start: int, nbytes: int) -> None:
        """Where it lies is not known here."""

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Make those rows that the bytes are of, and no more of them at a time than a chunk."""
        step = max(1, CHUNK_BYTES // max(1, self._row_bytes))
        end = start + len(buffer)
        for first in range(start // max(1, self._row_bytes), -(-end // max(1, self._row_bytes)), step):
            made = bytes_of(self._rows(first, min(first + step, self._count)).to(self._dtype))
            at = first * self._row_bytes
            begin, stop = max(start, at), min(end, at + len(made))
            buffer[begin - start : stop - start].copy_(made[begin - at : stop - at])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as its bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def stored_part(stored: Any, rows: Rows, cut: Any, *, shape: torch.Size, dtype: torch.dtype) -> Part:
    """A rank's part, by its cut, of those rows of a stored tensor, or of all; of this shape, used in this number format."""
    if not isinstance(cut, Cut):  # packed: only the whole of it can be cut
        return MadePart(shape, dtype, lambda start, stop: cut.take(stored)[start:stop])
    own_rows, columns = (cut.spans, ()) if cut.dim == 0 else ((), cut.spans)
    spans = (*rows, *own_rows)
    if isinstance(stored, StoredTensor) and dtype == stored.dtype and len(spans) <= 1 and not columns:
        return SpanPart(stored, spans[0].start * (stored.nbytes // stored.get_shape()[0]) if spans else 0)
    source = stored
    for chosen in filter(None, (rows, own_rows)):
        source = RowsOf(source, chosen)

    def take(start: int, stop: int) -> torch.Tensor:
        if not shape:
            return stored[:]
        wanted = slice(start, stop)
        return torch.cat([source[wanted, span] for span in columns], dim=1) if columns else source[(wanted,)]

    return MadePart(shape, dtype, take)
