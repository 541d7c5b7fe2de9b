"""The cores of a `ParallelLinear`: how a weight is held and multiplied with. A new kind is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ..stored import PLAIN
from .core import Core
from .plain import PlainCore

CORES: Mapping[str, type[Core]] = {PLAIN: PlainCore}
"""By `Stored.kind`."""
