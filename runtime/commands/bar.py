"""A progress bar on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from ..protocol import how_far

WIDTH = 30
SECONDS = 0.1


class Bar:
    """A `ReportProgress` that draws one line for each stage; nothing where `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._drawn = quiet, 0.0

    def __call__(self, stage: str, step: int, total: int, *, preview: Any = None, together: bool = True) -> None:
        now, ended = time.monotonic(), step >= total
        if self._quiet or (now - self._drawn < SECONDS and not ended):
            return
        self._drawn = now
        filled = WIDTH * step // max(total, 1)
        sys.stderr.write(
            f"\r{stage:<12} [{'#' * filled:<{WIDTH}}] {how_far(stage, step, total)}{chr(10) if ended else ''}"
        )
        sys.stderr.flush()
