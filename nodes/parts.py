"""The parts that need pyzmq, msgpack and pydantic, and stand-ins for them where those packages are missing.

ComfyUI must load the pack in any case, so that workflows keep their nodes and values; running a node then says what to
install. Every node takes these parts from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import host

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"


class MissingPackages(RuntimeError):
    """The pack is there, but not all the Python packages it needs."""

    __module__ = "outrigger"


class _Missing:
    def __init__(self, reason: ImportError) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise MissingPackages(
            f'run "{host.python()} -m pip install -r {REQUIREMENTS}" and restart ComfyUI: '
            f"Outrigger needs Python packages that are not installed ({self._reason})"
        )


try:
    from ..runtime import settings
    from ..runtime.settings import (
        BOTH_EXPERTS,
        COMPONENT_PLACES,
        DTYPES,
        EXPERTS,
        FETCH_KINDS,
        FROM_MODEL,
        MAX_DEGREE,
        MAX_STRENGTH,
        OFFLOAD_KINDS,
        QUANT_KINDS,
        SAMPLER_NAMES,
        SCHEDULER_NAMES,
        TINY_SHAPES,
    )
    from . import convert, session
except ImportError as reason:
    settings = convert = session = _Missing(reason)
    DTYPES, QUANT_KINDS, FROM_MODEL, TINY_SHAPES = ("auto",), ("none",), "from model", "tiny-shapes"
    SAMPLER_NAMES, SCHEDULER_NAMES, MAX_DEGREE, MAX_STRENGTH = ("euler",), ("simple",), 64, 100.0
    OFFLOAD_KINDS, COMPONENT_PLACES, FETCH_KINDS = ("none",), ("auto",), ("auto",)
    EXPERTS, BOTH_EXPERTS = (), "both"
