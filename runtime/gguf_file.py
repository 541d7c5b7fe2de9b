"""The tensors of a .gguf file: matrices in the blocks they are stored in, and everything else as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .offload.tensor_file import DTYPES, TensorFile
from .quant.gguf_blocks import dequantise
from .safetensors_header import TensorEntry
from .stored import BLOCKS


class GGUFFile:
    """In the form of safetensors' own `safe_open`, from the `entries` of its header. `packed` are the names of those matrices
    that are given as rows of bytes, `(out, bytes)` uint8; of a file that is not `mapped` no page counts as this process's.
    """

    def __init__(self, path: Path, *, entries: Mapping[str, TensorEntry], packed: frozenset[str], mapped: bool) -> None:
        self._entries, self._packed = entries, packed
        raw = {name: _as_bytes(entry) for name, entry in entries.items()}
        self._file = MappedFile(path, raw) if mapped else TensorFile(path, raw)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.__exit__(*raised)

    def get_tensor(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> Any:
        """A tensor to be sliced; one in blocks is read and turned into float32 at once, unless it is packed."""
        stored, entry = self._file.get_slice(name), self._entries[name]
        if name in self._packed or entry.dtype not in BLOCKS:
            return stored
        return Sliced(dequantise(stored[:], entry.dtype).view(entry.shape))


class MappedFile:
    """The tensors of a file, left where they are in it: `entries` are counted from its start."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries
        self._bytes = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def __exit__(self, *raised: object) -> None:
        del self._bytes  # what was taken from it holds it for as long as it is used

    def get_slice(self, name: str) -> Sliced:
        """A tensor to be sliced."""
        entry = self._entries[name]
        return Sliced(self._bytes[entry.start : entry.end].view(DTYPES[entry.dtype]).view(entry.shape))


class Sliced:
    """A tensor that is there, in the form of one that is in a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self._tensor.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._tensor[place]


def _as_bytes(entry: TensorEntry) -> TensorEntry:
    """A tensor in blocks as the bytes that it is, in as many rows as it has, or in one where a row is no whole number."""
    block = BLOCKS.get(entry.dtype)
    if block is None:
        return entry
    rows = entry.shape[0] if entry.shape[-1] % block.elements == 0 and len(entry.shape) == 2 else 1
    nbytes = entry.end - entry.start
    return replace(entry, dtype="U8", shape=(rows, nbytes // rows if rows else 0))
