"""JSON that lies beside weights: read as an object, or refused by the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import Refused

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `Refused` when it is missing, huge or something else."""
    if not path.is_file():
        raise Refused(f"{path} is missing: the model folder is not complete, download it again")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise Refused(f"{path} has {path.stat().st_size} bytes: that is no configuration")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON: download it again") from error
    if not isinstance(content, dict):
        raise Refused(f"{path} is not a JSON object: download it again")
    return content
