"""The number formats of a file's weights, and what ComfyUI puts beside those in 8 bits, found to fit together or refused.

A layer in 8 bits has `weight_scale`, one number that its weight is multiplied by, and `comfy_quant`, JSON in bytes that names
its format; or the metadata of the file name it, as `_quantization_metadata`. Older files call the scale `scale_weight` and
mark the file once, with `scaled_fp8`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

from .errors import Refused
from .layouts import PREFIXES
from .safetensors_header import TensorEntry, read_data, read_metadata
from .stored import BLOCKS, FP8_FORMATS, WEIGHT_SCALE
from .weight_files import Headers, merged

FLOATS = ("F64", "F32", "F16", "BF16")
MARK, MARKS = "comfy_quant", "_quantization_metadata"
MARKED: Mapping[str, str] = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""The formats that a mark may name, by what headers call them."""
SCALES = (WEIGHT_SCALE, "scale_weight")
READERS: Mapping[str, Callable[[bytes], tuple[float]]] = {
    "F64": struct.Struct("<d").unpack, "F32": struct.Struct("<f").unpack, "F16": struct.Struct("<e").unpack,
    "BF16": lambda raw: struct.unpack("<f", b"\0\0" + raw),
}  # fmt: skip
"""What the bytes of a number are, by its format."""
MAX_MARK_BYTES = 4096
SHOWN = 60
OTHER_FILE = "use the bf16 or fp8 file"


def check_formats(path: Path, formats: Mapping[str, str]) -> None:
    """Raise `Refused` for a tensor in a format that weights are not read in, of those that the file has by these names."""
    for name, number_format in formats.items():
        if number_format not in (*FLOATS, *FP8_FORMATS, *BLOCKS):
            raise Refused(
                f"{path} is quantised or damaged ({name} is {number_format}), and weights are read in "
                f"{', '.join((*FLOATS, *FP8_FORMATS))}: {OTHER_FILE}"
            )


def check_eight_bit(headers: Headers, *, unscaled: Container[str] = ()) -> None:
    """Raise `Refused` for a layer whose mark, weight and scale do not make up a weight in 8 bits.

    `unscaled` are layers that mean what they say without a scale: to ComfyUI tables of words do, and Linears do not.
    """
    entries = merged(headers)
    for path, header in headers.items():
        for layer, said in _marks(path, header):
            _check_mark(path, layer, said, entries, unscaled)
        scales = {name: entry for name, entry in header.items() if _leaf(name) in SCALES}
        for name, entry in scales.items():
            _check_scale(path, name, entry, entries)
        for (name, entry), raw in zip(scales.items(), read_data(path, scales.values()), strict=True):
            [scale] = READERS[entry.dtype](raw)
            if not 0 < scale < math.inf:
                raise Refused(
                    f"{path}: {name} is {scale:g}, but a scale is above 0: the file is damaged, download it again"
                )


def _marks(path: Path, header: Mapping[str, TensorEntry]) -> Iterator[tuple[str, bytes]]:
    """The layers that are said to be in some format, each with the JSON that says it."""
    marks = {name: entry for name, entry in header.items() if _leaf(name) == MARK}
    for name, entry in marks.items():
        if entry.dtype != "U8" or entry.end - entry.start > MAX_MARK_BYTES:
            raise Refused(f"{path}: {name} is {entry.dtype} {entry.shape}, and no mark of a format: download it again")
    yield from zip(map(_layer, marks), read_data(path, marks.values()), strict=True)
    said = read_metadata(path).get(MARKS)
    if said is None:
        return
    try:
        layers = dict(json.loads(said)["layers"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            f"{path}: {MARKS} in its metadata cannot be read: the file is damaged, download it again"
        ) from error
    spelled = {name.removeprefix(prefix): name for name in map(_layer, header) for prefix in ("", *PREFIXES)}
    yield from ((spelled[layer], json.dumps(mark).encode()) for layer, mark in layers.items() if layer in spelled)


def _check_mark(
    path: Path, layer: str, said: bytes, entries: Mapping[str, TensorEntry], unscaled: Container[str]
) -> None:
    try:
        number_format = json.loads(said)["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        shown = ascii(said[:SHOWN].decode("latin-1"))
        raise Refused(
            f"{path}: the mark of {layer} names no format ({shown}): the file is damaged, download it again"
        ) from error
    if not isinstance(number_format, str) or number_format not in MARKED:
        raise Refused(
            f"{path}: {layer} is marked as {str(number_format)[:SHOWN]}, which is not available; there are "
            f"{' and '.join(MARKED)}: {OTHER_FILE}"
        )
    weight = entries.get(f"{layer}.weight")
    if weight is None or weight.dtype != MARKED[number_format]:
        raise Refused(
            f"{path}: {layer} is marked as {number_format}, but its weight is {weight.dtype if weight else 'not there'}: the "
            f"file is damaged, download it again"
        )
    if layer not in unscaled and not any(f"{layer}.{leaf}" in entries for leaf in SCALES):
        raise Refused(
            f"{path}: {layer} is marked as {number_format}, but has no {WEIGHT_SCALE}, without which its numbers are not "
            f"known: the file is damaged, download it again"
        )


def _check_scale(path: Path, name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> None:
    weight = entries.get(f"{_layer(name)}.weight")
    if weight is None or weight.dtype not in FP8_FORMATS:
        raise Refused(
            f"{path}: {name} scales a weight in 8 bits, but that is {weight.dtype if weight else 'not there'}: the file is "
            f"damaged or quantised in a way that is not available: {OTHER_FILE}"
        )
    if math.prod(entry.shape) != 1:
        raise Refused(
            f"{path}: {name} is {entry.shape}, but a weight in 8 bits is scaled by one number here: {OTHER_FILE}"
        )
    if entry.dtype not in READERS:
        raise Refused(f"{path}: {name} is {entry.dtype}, and a scale is one of {', '.join(READERS)}: {OTHER_FILE}")


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
