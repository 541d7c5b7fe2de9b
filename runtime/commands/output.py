"""What a command says on standard output, and the files it writes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import Refused


def show(answer: dict[str, Any], described: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """One JSON object and nothing else, or the same for a reader."""
    sys.stdout.write(f"{json.dumps(answer) if as_json else described(answer)}\n")


def refused(reason: str, error: Exception) -> dict[str, Any]:
    """What `--json` prints of a command that was refused: why, and the nearest plan that works where it was a plan."""
    answer = {"ok": False, "reason": reason}
    if hasattr(error, "nearest"):
        nearest = error.nearest
        answer |= {"nearest": nearest and nearest.degrees, "nearest_devices": nearest and nearest.devices}
        offload, latent = error.smaller.offload, error.smaller.latent
        answer |= {
            "nearest_offload": offload and offload.offload,
            "nearest_latent": latent and "x".join(map(str, latent)),
        }
    return answer


def check_can_write(path: Path) -> None:
    """Raise `Refused` for a file that cannot be written, before anything is computed."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise Refused(f"{path}: there is no folder {folder}: make it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise Refused(f"{path} {'is a folder' if path.is_dir() else 'cannot be written'}: name another file")
