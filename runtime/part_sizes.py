"""What text encoders and VAE of a model take once they are read, by the headers of their files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from .encoders.vae_names import vae_part
from .safetensors_header import TensorEntry, read_header
from .text_files import TextPart
from .weight_files import DIFFUSERS, weight_files

VAE_ITEM_BYTES = 4
"""They are held in float32."""


def text_bytes(parts: Iterable[TextPart], item_bytes: int) -> int:
    """Of whole text encoders, in numbers of so many bytes."""
    return item_bytes * _numbers(entry for part in parts for _, _, entry in part.file.tensors.values())


def vae_bytes(path: Path) -> int:
    """Of the VAE in a file or folder. Raises `Refused` where that cannot be read."""
    if path.is_dir():
        headers = [read_header(file) for file in weight_files(path, DIFFUSERS)]
        return VAE_ITEM_BYTES * _numbers(entry for header in headers for entry in header.values())
    header = read_header(path)
    return VAE_ITEM_BYTES * _numbers(header[stored] for stored in vae_part(header).values())


def _numbers(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)
