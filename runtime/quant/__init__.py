"""The cores of a `ParallelLinear`: how a weight is held and multiplied with. A new kind is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ..stored import PLAIN, SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4
from .core import Core
from .plain import PlainCore
from .svdquant.core import Int4Core, NVFP4Core, UnsignedInt4Core

CORES: Mapping[str, type[Core]] = {
    PLAIN: PlainCore,
    SVDQUANT_INT4: Int4Core,
    SVDQUANT_INT4_UNSIGNED: UnsignedInt4Core,
    SVDQUANT_NVFP4: NVFP4Core,
}
"""By `Stored.kind`."""
