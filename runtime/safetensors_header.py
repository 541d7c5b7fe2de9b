"""The header of a .safetensors file, read by hand: names, shapes and dtypes, no weight and no torch.

Format: 8 bytes little-endian length, that many bytes of JSON, then the data (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import Refused

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_DIMS = 16
MAX_ITEMS = 1 << 20
"""No header has more lists, tables or items of them: each takes memory, whatever it is."""
METADATA = "__metadata__"
DTYPE = re.compile(r"BOOL|[A-Z]{1,2}(?P<bits>[1-9][0-9]?)(_[A-Z0-9]+)?")
"""Such as F32, BF16 and F8_E4M3."""
BOOL_BITS = 8


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor; `start` and `end` are bytes within the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file, by name. Raises `Refused` when the file is not what its name says."""
    header, data_bytes = _read(path)
    header.pop(METADATA, None)
    return _checked(path, header, data_bytes=data_bytes)


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file has beside its tensors. Raises `Refused` as `read_header` does."""
    texts = _read(path)[0].get(METADATA, {})
    return {key: text for key, text in texts.items() if isinstance(text, str)} if isinstance(texts, dict) else {}


def read_data(path: Path, entries: Iterable[TensorEntry]) -> Iterator[bytes]:
    """The bytes of some small tensors of a file, which `read_header` has found there."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for entry in entries:
            file.seek(start + entry.start)
            yield file.read(entry.end - entry.start)


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """The header as it stands, and how many bytes of data follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or length < 2 or length > MAX_HEADER_BYTES:
            raise Refused(f"{path} is not a .safetensors file{what_it_is(path)}: download it again, or choose another")
        if length > size - 8:
            raise Refused(
                f"{path} is cut short or not a .safetensors file{what_it_is(path)}: its header should have {length} "
                f"bytes, but the whole file has {size}. Download it again"
            )
        raw = file.read(length)
    return _decoded(path, raw), size - 8 - length


def what_it_is(path: Path) -> str:
    """What a file is by its first bytes, to be put behind "is not a ... file"; empty when that is not known."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return " but the pointer of one (Git LFS); the weights themselves were not downloaded"
    if start.startswith(b"GGUF"):
        return " but a GGUF file (name it .gguf)"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return " but a pickled PyTorch file"
    if start and start.lstrip()[:1] == b"<":
        return " but a web page"
    if start and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        return " but a text file"
    return ""


def misplaced(entries: Mapping[str, TensorEntry], *, padding: int = 1) -> str:
    """In words, two tensors that have bytes in common, or `padding` bytes or more between them; empty where there are none."""
    placed = sorted((entry.start, entry.end, name) for name, entry in entries.items() if entry.start < entry.end)
    for (_, end, first), (start, _, second) in pairwise(placed):
        if start < end:
            return f"its tensors {first!r} and {second!r} share bytes"
        if start - end >= padding:
            return f"there are {start - end} bytes between its tensors {first!r} and {second!r} that are of neither"
    return ""


def _decoded(path: Path, raw: bytes) -> dict[str, Any]:
    if max(map(raw.count, (b"[", b"{", b","))) > MAX_ITEMS:
        raise Refused(f"{path} is damaged: its header is no table of tensors. Download it again")
    twice: list[str] = []

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return found

    try:
        header = json.loads(raw, object_pairs_hook=as_dict)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not a .safetensors file{what_it_is(path)}: its header is not JSON") from error
    if not isinstance(header, dict):
        raise Refused(f"{path} is not a .safetensors file: its header is not a table of tensors")
    if twice:
        raise Refused(f"{path} is damaged: its header has {twice[0]!r} more than once. Download it again")
    return header


def _checked(path: Path, header: dict[str, Any], *, data_bytes: int) -> dict[str, TensorEntry]:
    entries = {name: _entry(path, name, described) for name, described in header.items()}
    needed = max((entry.end for entry in entries.values()), default=0)
    if needed > data_bytes:
        raise Refused(
            f"{path} is cut short: its tensors need {needed} bytes, but {data_bytes} are there. Download it again"
        )
    if not entries:
        raise Refused(f"{path} holds no tensors")
    if words := misplaced(entries):
        raise Refused(f"{path} is damaged: {words}. Download it again")
    return entries


def _entry(path: Path, name: str, described: Any) -> TensorEntry:
    try:
        start, end = described["data_offsets"]
        shape, dtype = tuple(described["shape"]), described["dtype"]
    except (TypeError, KeyError, ValueError) as error:
        raise Refused(f"{path} is damaged: its header does not say where tensor {name!r} is") from error
    numbers = (start, end, *shape)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) > MAX_DIMS or start > end:
        raise Refused(f"{path} is damaged: tensor {name!r} has shape {shape} at bytes {start} to {end}")
    named = DTYPE.fullmatch(str(dtype))
    if named is None or math.prod(shape) * int(named["bits"] or BOOL_BITS) != 8 * (end - start):
        raise Refused(f"{path} is damaged: tensor {name!r} is {dtype} {shape}, but takes {end - start} bytes")
    return TensorEntry(dtype=str(dtype), shape=shape, start=start, end=end)
