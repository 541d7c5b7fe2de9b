"""A file of tensors of which what is asked for is read, and nothing mapped: no page of it counts as this process's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import own_memory
from ..loaded_files import FileState
from ..safetensors_header import TensorEntry, read_header

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CHUNK_BYTES = 2 << 20
"""Rows of which not all columns are wanted are read so many bytes at a time."""


class TensorFile:
    """The tensors of a file, each to be sliced, in the form of safetensors' own `safe_open`.

    `entries` are those of a file that is no .safetensors file, counted from its start.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry] | None = None) -> None:
        self._file = path.open("rb", buffering=0)
        self._state = FileState.of(self._file.fileno())
        self._entries = read_header(path) if entries is None else entries
        self._start = 8 + int.from_bytes(self._file.read(8), "little") if entries is None else 0

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def get_tensor(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> StoredTensor:
        """A tensor, of which nothing is read yet."""
        return StoredTensor(self, self._entries[name])

    def read_into(self, tensor: torch.Tensor, place: int) -> None:
        """Fill a contiguous tensor from a place within the data. Raises `OSError` when the file ends before, or has been
        written to since it was opened.
        """
        buffer, place = memoryview(tensor.view(-1).view(torch.uint8).numpy()), self._start + place
        while len(buffer):
            count = self._read(buffer, place)
            if not count:
                raise OSError(f"{self._file.name} ended while it was read: it has been changed")
            buffer, place = buffer[count:], place + count
        if FileState.of(self._file.fileno()).is_written(self._state):
            raise OSError(f"{self._file.name} has been written to since the model was loaded")

    def announce(self, place: int, nbytes: int) -> None:
        """Say what is read next, so that the system asks the disk for all of it at once."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._start + place, nbytes, os.POSIX_FADV_WILLNEED)

    def _read(self, buffer: memoryview, place: int) -> int:
        if hasattr(os, "preadv"):  # moves no position, which another thread may be using
            return os.preadv(self._file.fileno(), [buffer], place)
        self._file.seek(place)
        return self._file.readinto(buffer)


class StoredTensor:
    """A tensor in a file, sliced as the one that it holds would be."""

    def __init__(self, file: TensorFile, entry: TensorEntry) -> None:
        self._file, self._entry, self.dtype = file, entry, DTYPES[entry.dtype]

    @property
    def nbytes(self) -> int:
        """What it takes in the file."""
        return self._entry.end - self._entry.start

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill a buffer of bytes from one of its bytes on."""
        self._file.read_into(buffer, self._entry.start + start)

    def announce(self, start: int, nbytes: int) -> None:
        """Say which of its bytes are read next."""
        self._file.announce(self._entry.start + start, nbytes)

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self._entry.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        """The part at `place`: slices of the first dims. Of rows of which some columns are left out, no more than a chunk is
        held beside it.
        """
        first, *others = place if isinstance(place, tuple) else (place,)
        rows = range(*first.indices(self._entry.shape[0])) if self._entry.shape else range(1)
        if not others:
            return self._rows(rows)
        step = max(1, CHUNK_BYTES // max(1, self._row_bytes))
        wanted = torch.empty((len(rows), *self._entry.shape[1:]), device="meta")[(slice(None), *others)].shape
        part, chunk = own_memory.empty(wanted, self.dtype), self._empty(min(step, len(rows)))
        for at in range(0, len(rows), step):
            piece = self._fill(chunk[: len(rows) - at], rows.start + at)
            part[at : at + step] = piece[(slice(None), *others)]
        return part

    @property
    def _row_bytes(self) -> int:
        return (self._entry.end - self._entry.start) // max(1, self._entry.shape[0])

    def _rows(self, rows: range) -> torch.Tensor:
        return self._fill(self._empty(len(rows)), rows.start)

    def _empty(self, rows: int) -> torch.Tensor:
        return own_memory.empty((rows, *self._entry.shape[1:]) if self._entry.shape else (), self.dtype)

    def _fill(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """Read rows from the first on into a tensor of them."""
        self._file.read_into(tensor, self._entry.start + (first * self._row_bytes if self._entry.shape else 0))
        return tensor
