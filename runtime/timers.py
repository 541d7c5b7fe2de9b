"""How exactly the system keeps the timers of threads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_NS = 200_000_000
_SET_SLACK, _GET_SLACK = 29, 30
"""Of `prctl(2)`: PR_SET_TIMERSLACK and PR_GET_TIMERSLACK."""


@contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are started meanwhile may be woken `PATIENCE_NS` late by a timer, though never by data.

    The thread behind each gloo group looks at its end a hundred times a second for as long as it lives; like this it does
    so a few times, and a rank that waits for work costs nothing. Elsewhere than on Linux it changes nothing.
    """
    if sys.platform != "linux":
        yield
        return
    library = ctypes.CDLL(None)
    before = library.prctl(_GET_SLACK, 0, 0, 0, 0)
    library.prctl(_SET_SLACK, ctypes.c_ulong(PATIENCE_NS), 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_SET_SLACK, ctypes.c_ulong(max(before, 1)), 0, 0, 0)
