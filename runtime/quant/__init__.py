"""The cores of a `ParallelLinear`: how a weight is held and multiplied with. A new kind is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ..stored import AWQ_INT4, BLOCKS, FP8, FP8_E5M2, FP8_WIDENED, JOINED, PLAIN
from .awq import AWQCore
from .core import Core
from .fp8 import Fp8Core, Fp8E5M2Core, WidenedFp8Core
from .gguf import GGUFCore
from .joined import JoinedCore
from .plain import PlainCore
from .svdquant.core import FOUR_BIT

CORES: Mapping[str, type[Core]] = {
    PLAIN: PlainCore,
    FP8: Fp8Core,
    FP8_E5M2: Fp8E5M2Core,
    FP8_WIDENED: WidenedFp8Core,
    **FOUR_BIT,
    AWQ_INT4: AWQCore,
    JOINED: JoinedCore,
    **dict.fromkeys(BLOCKS, GGUFCore),
}
"""By `Stored.kind`."""
