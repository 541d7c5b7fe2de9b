"""The cores of a `ParallelLinear`: how a weight is held and multiplied with. A new kind is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ..parallel.shares import Cut
from ..stored import BLOCKS, FOUR_BIT, FP8, FP8_E5M2, FP8_WIDENED, JOINED, PLAIN, Stored
from .core import Core
from .fp8 import Fp8Core, Fp8E5M2Core, WidenedFp8Core
from .gguf import GGUFCore
from .joined import JoinedCore
from .kernels import four_bit_core
from .plain import PlainCore

CORES: Mapping[str, Callable[[nn.Linear, Cut, Stored], Core]] = {
    PLAIN: PlainCore,
    FP8: Fp8Core,
    FP8_E5M2: Fp8E5M2Core,
    FP8_WIDENED: WidenedFp8Core,
    **dict.fromkeys(FOUR_BIT, four_bit_core),
    JOINED: JoinedCore,
    **dict.fromkeys(BLOCKS, GGUFCore),
}
"""By `Stored.kind`."""
