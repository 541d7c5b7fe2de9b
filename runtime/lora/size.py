"""How much LoRAs will take beside the weights, before one is read. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..safetensors_header import read_header
from ..settings import BOTH_EXPERTS, LoraSettings
from .formats import TEXT_ENCODER


def numbers_beside(loras: Iterable[LoraSettings], *, experts: int) -> int:
    """The numbers that lie beside the weights of so many experts, at most: cut ones count as whole. None of what is folded
    in, is off or cannot be read, which whoever puts it on will tell.
    """
    on = [lora for lora in loras if lora.strength and not lora.fuse]
    return sum(_numbers_in(Path(lora.path)) * (experts if lora.expert == BOTH_EXPERTS else 1) for lora in on)


def _numbers_in(path: Path) -> int:
    with suppress(OSError, ValueError):
        return sum(math.prod(entry.shape) for name, entry in read_header(path).items() if not TEXT_ENCODER.match(name))
    return 0
