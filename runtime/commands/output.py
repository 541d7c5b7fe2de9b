"""What a command says on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def show(answer: dict[str, Any], described: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """One JSON object and nothing else, or the same for a reader."""
    sys.stdout.write(f"{json.dumps(answer) if as_json else described(answer)}\n")
