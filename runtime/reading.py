"""Tensors from files of weights: left where they are in the file, or this rank's part copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .errors import Refused
from .facts import ModelFacts, Source
from .gguf_file import GGUFFile
from .gguf_header import read_gguf
from .linear import LocalPart
from .offload.tensor_file import TensorFile
from .parallel.lengths import length_of
from .parallel.shares import WHOLE, RowsOf
from .safetensors_header import TensorEntry, read_header

OpenFile = Callable[[Path], Any]
mapped_safetensors = partial(safe_open, framework="pt", device="cpu")


class WeightFile:
    """A source open in two ways: `mapped`, for what stays where it is, and read, for the rest. Several threads may read.

    Of what is mapped the pages, and more around them, count as this process's memory for as long as a tensor of it is held.
    """

    def __init__(self, source: Source, *, mapped: bool) -> None:
        self._source = source
        self._reader = opener(source, mapped=False)(source.path)
        self._whole = opener(source, mapped=True)(source.path) if mapped else self._reader

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *raised: object) -> None:
        for file in {id(each): each for each in (self._reader, self._whole)}.values():
            file.__exit__(*raised)

    def get_slice(self, name: str) -> Any:
        """What the file has for a tensor of the model, nothing of it read."""
        return self._reader.get_slice(self._source.names[name])

    def part(self, name: str, part: LocalPart | None, *, stays: bool = True) -> torch.Tensor | None:
        """A rank's part of a tensor of the model, left in the file where it `stays`; None for one that it does without."""
        if part is None:
            return None
        rows = self._source.rows.get(name, ())
        if part.cut == WHOLE:
            full = (self._whole if stays else self._reader).get_tensor(self._source.names[name])
            return RowsOf(full, rows)[slice(None),] if rows else full
        stored = self.get_slice(name)
        return part.cut.take(RowsOf(stored, rows) if rows else stored)


def opener(source: Source, *, mapped: bool) -> OpenFile:
    """How to open a file of weights: mapped, or to have what is asked for read."""
    if source.is_gguf:
        return partial(GGUFFile, entries=read_gguf(source.path), packed=source.packed, mapped=mapped)
    return mapped_safetensors if mapped else TensorFile


def stored_bytes(source: Source) -> Mapping[str, int]:
    """What each tensor of the model takes in the file."""
    header = (read_gguf if source.is_gguf else read_header)(source.path)
    return {name: _bytes_of(header[stored], source.rows.get(name, ())) for name, stored in source.names.items()}


def check_shape(stored: Any, name: str, *, shapes: Mapping[str, torch.Size], source: Source, facts: ModelFacts) -> None:
    """Raise `Refused` where a slice of a file is not of the shape that the model has for it."""
    shape, rows = tuple(stored.get_shape()), source.rows.get(name, ())
    if rows:
        shape = (length_of(rows), *shape[1:])
    if shape != tuple(shapes[name]):
        raise Refused(
            f"{source.path}: {source.names[name]} has shape {shape}, but this {facts.spec.title} "
            f"needs {tuple(shapes[name])}: download the file again"
        )


def _bytes_of(entry: TensorEntry, rows: tuple[slice, ...]) -> int:
    nbytes = entry.end - entry.start
    return nbytes * length_of(rows) // entry.shape[0] if rows else nbytes
