"""The header of a .gguf file, read by hand: names, shapes and formats, no weight and no torch.

Format: github.com/ggml-org/ggml, docs/gguf.md. Files for ComfyUI keep the names of the original checkpoint, and under
`comfy.gguf.orig_shape.NAME` the shape of a tensor that had to be stored in another one.
"""

from __future__ import annotations

import math
import mmap
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .errors import Refused
from .safetensors_header import MAX_DIMS, MAX_HEADER_BYTES, TensorEntry, misplaced, what_it_is
from .stored import BLOCKS, IN_GRIDS

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT_KEY, SHAPE_KEY = "general.alignment", "comfy.gguf.orig_shape."
ALIGNMENT = 32
SMALLEST_ALIGNMENT = 8
STRING, ARRAY = 8, 9
SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
"""How a value of each type is packed; a string and an array are more than one."""
FORMATS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MOST, MOST_TEXTS = 1 << 17, 1 << 20
"""No file has more tensors or values, and no tokenizer more words."""


class Damaged(Exception):
    """The header does not add up; the text says where."""


def read_gguf(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file, by name, its bytes counted from the start of the file.

    Raises `Refused` when the file is not what its name says, or has a tensor in a format that is not read.
    """
    return _header(path).entries


def read_texts(path: Path) -> dict[str, str]:
    """The texts that a file has beside its tensors: converters take over what a .safetensors file says of itself. Raises
    `Refused` as `read_gguf`.
    """
    return _header(path).texts


def _header(path: Path) -> Header:
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise Refused(f"{path} is not a .gguf file{what_it_is(path)}: download it again, or choose another")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            try:
                return _Reader(raw, size).header()
            except (Damaged, struct.error, UnicodeDecodeError) as error:
                raise Refused(f"{path} is damaged or cut short: {error}. Download it again") from error
            except Refused as refusal:
                raise Refused(f"{path}: {refusal}") from None


class Header(NamedTuple):
    """What it says of each tensor, and its texts by their keys."""

    entries: dict[str, TensorEntry]
    texts: dict[str, str]


class _Reader:
    """Reads along the header; a number in it is believed only where the file is long enough for it."""

    def __init__(self, raw: mmap.mmap, size: int) -> None:
        self._raw, self._place, self._size = raw, len(MAGIC), size
        self._end = min(size, MAX_HEADER_BYTES)
        self._words = 0
        self._texts: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._alignment = ALIGNMENT

    def header(self) -> Header:
        """All that is of use of it."""
        [version] = self._unpack("I")
        if int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            raise Refused("it is written in big-endian order, and little-endian order is read: download that one")
        if version not in VERSIONS:
            raise Refused(f"it is GGUF version {version}, but {' and '.join(map(str, VERSIONS))} are read")
        tensors, values = self._unpack("QQ")
        if max(tensors, values) > MOST:
            raise Damaged(f"its header should have {tensors} tensors and {values} values")
        for _ in range(values):
            self._take_value(self._text())
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for name, described in (self._tensor() for _ in range(tensors)):
            if found.setdefault(name, described) is not described:
                raise Damaged(f"its header has tensor {name!r} more than once")
        if not found:
            raise Damaged("it holds no tensors")
        start = -(-self._place // self._alignment) * self._alignment
        entries = {name: self._entry(name, *described, start) for name, described in found.items()}
        if words := misplaced(entries, padding=self._alignment):
            raise Damaged(words)
        return Header(entries, self._texts)

    def _unpack(self, packed: str) -> tuple[Any, ...]:
        place, self._place = self._place, self._place + struct.calcsize(f"<{packed}")
        if self._place > self._end:
            raise Damaged(f"its header goes on beyond byte {self._end}")
        return struct.unpack_from(f"<{packed}", self._raw, place)

    def _text(self, errors: str = "strict") -> str:
        [length] = self._unpack("Q")
        self._skip(length)
        return self._raw[self._place - length : self._place].decode("utf-8", errors)

    def _skip(self, length: int) -> None:
        if length > self._end - self._place:
            raise Damaged(f"{length} bytes at byte {self._place} of its header go on beyond byte {self._end}")
        self._place += length

    def _take_value(self, key: str) -> None:
        """Keep what is of use of a value, and pass over the rest of them."""
        [kind] = self._unpack("I")
        if kind == ARRAY:
            kind, count = self._unpack("IQ")
            items = self._items(kind, count, keep=key.startswith(SHAPE_KEY))
            if key.startswith(SHAPE_KEY):
                self._shapes[key.removeprefix(SHAPE_KEY)] = tuple(items)
        elif kind == STRING:
            self._texts[key] = self._text(errors="replace")
        else:
            [value] = self._unpack(self._scalar(kind))
            if key == ALIGNMENT_KEY:
                self._alignment = value
                if type(value) is not int or value < SMALLEST_ALIGNMENT or value % SMALLEST_ALIGNMENT:
                    raise Damaged(f"its tensors are aligned to {value} bytes")

    def _items(self, kind: int, count: int, *, keep: bool) -> tuple[Any, ...]:
        if kind == STRING:
            self._words += count
            if self._words > MOST_TEXTS:
                raise Damaged(f"it has a list of {count} texts")
            for _ in range(count):
                self._skip(*self._unpack("Q"))
            return ()
        packed = self._scalar(kind)
        if keep and count <= MAX_DIMS:
            return self._unpack(packed * count)
        self._skip(count * struct.calcsize(f"<{packed}"))
        return ()

    def _scalar(self, kind: int) -> str:
        if kind >= len(SCALARS) or not SCALARS[kind]:
            raise Damaged(f"it has a value of type {kind}")
        return SCALARS[kind]

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Name, shape (GGUF has the fastest dim first), format and offset of the next tensor."""
        name, [dims] = self._text(), self._unpack("I")
        if dims > MAX_DIMS:
            raise Damaged(f"tensor {name!r} has {dims} dims")
        sizes = self._unpack("Q" * dims)
        return name, (tuple(reversed(sizes)), *self._unpack("IQ"))

    def _entry(self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> TensorEntry:
        named = FORMATS.get(number, f"of format {number}")
        if named not in PLAIN_BYTES and named not in BLOCKS:
            raise Refused(
                f"tensor {name!r} is {named}, which is not read. There are: {', '.join([*PLAIN_BYTES, *BLOCKS])}"
            )
        if named in IN_GRIDS and find_spec("gguf") is None:
            raise Refused(
                f"tensor {name!r} is {named}, whose tables are in the package gguf: install it (python -m pip install gguf), or "
                f"choose a file without IQ1, IQ2 and IQ3"
            )
        block = BLOCKS.get(named)
        if block and (not shape or shape[-1] % block.elements):
            raise Damaged(f"tensor {name!r} is {named} {shape}, which is no whole number of blocks")
        count = math.prod(shape)
        nbytes = count // block.elements * block.nbytes if block else count * PLAIN_BYTES[named]
        first = start + offset
        if offset % self._alignment:
            raise Damaged(f"tensor {name!r} is at byte {offset} of the data, which is no multiple of {self._alignment}")
        if first + nbytes > self._size:
            raise Damaged(f"tensor {name!r} is {nbytes} bytes at byte {first}, but the file has {self._size}")
        original = self._shapes.get(name, shape)
        if math.prod(original) != count or any(type(size) is not int or size < 0 for size in original):
            raise Damaged(f"tensor {name!r} is {shape} and should be {original}")
        return TensorEntry(dtype=named, shape=original, start=first, end=first + nbytes)
