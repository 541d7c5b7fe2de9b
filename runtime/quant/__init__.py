"""The cores of a `ParallelLinear`: how a weight is held and multiplied with. A new kind is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ..stored import AWQ_INT4, JOINED, PLAIN
from .awq import AWQCore
from .core import Core
from .joined import JoinedCore
from .plain import PlainCore
from .svdquant.core import FOUR_BIT

CORES: Mapping[str, type[Core]] = {PLAIN: PlainCore, **FOUR_BIT, AWQ_INT4: AWQCore, JOINED: JoinedCore}
"""By `Stored.kind`."""
