"""The tensors of a model one at a time, and a safetensors file written one tensor at a time: no more is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from ..checkpoint import Shapes, random_tensors
from ..inspection import ModelFacts
from ..layouts import Rows
from ..parallel.shares import RowsOf
from ..reading import opener

DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32",
}  # fmt: skip
METADATA = "__metadata__"
ALIGNMENT = 8


class Weights:
    """The tensors of a model by the names that its class has for them; a context manager that holds the files open. None of
    their pages are mapped, which would add up to the whole model.
    """

    def __init__(self, facts: ModelFacts, shapes: Shapes) -> None:
        self._facts, self._stack = facts, ExitStack()
        self._drawn = {} if facts.sources else dict(random_tensors(shapes))
        self._places: dict[str, tuple[Any, str, Rows]] = {}

    def __enter__(self) -> Weights:
        for source in self._facts.sources:
            file = self._stack.enter_context(opener(source, mapped=False)(source.path))
            places = {name: (file, stored, source.rows.get(name, ())) for name, stored in source.names.items()}
            self._places.update(places)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(self._drawn or self._places)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype that it is stored in."""
        if name in self._drawn:
            return self._drawn[name]
        file, stored, rows = self._places[name]
        full = file.get_tensor(stored)
        return RowsOf(full, rows)[slice(None),] if rows else full


Entry = tuple[str, torch.dtype, tuple[int, ...]]


def write_tensors(
    path: Path, entries: Iterable[Entry], read: Callable[[str], torch.Tensor], *, metadata: Mapping[str, str]
) -> None:
    """A safetensors file of these tensors, each read when it is its turn (github.com/huggingface/safetensors)."""
    entries, end = list(entries), 0
    header: dict[str, object] = {METADATA: dict(metadata)}
    for name, dtype, shape in entries:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _, _ in entries:
            _write(file, read(name))


def write_whole(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file of these tensors, which is there when it is whole."""
    begun = path.with_name(f"{path.name}.begun")
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_tensors(begun, entries, tensors.__getitem__, metadata={})
    begun.replace(path)


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    if tensor.numel():
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
