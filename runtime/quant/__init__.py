"""The cores of a `ParallelLinear`: how a weight is held and multiplied with. A new kind is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ..stored import PLAIN
from .core import Core
from .plain import PlainCore
from .svdquant.core import Int4Core, NVFP4Core, UnsignedInt4Core

CORES: Mapping[str, type[Core]] = {
    PLAIN: PlainCore,
    "svdquant-int4": Int4Core,
    "svdquant-int4-unsigned": UnsignedInt4Core,
    "svdquant-nvfp4": NVFP4Core,
}
"""By `Stored.kind`."""
