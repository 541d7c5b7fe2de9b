"""All ranks go on, stop or fail alike, so that none is left waiting for another and all hold the same afterwards."""

from __future__ import annotations

import json

from .errors import Cancelled, Refused
from .mesh import Mesh
from .parallel.collectives import all_gather_bytes

GO_ON, STOP, FAIL = range(3)


def agree(mesh: Mesh, *, stop: bool, failure: Exception | None = None) -> None:
    """Raise `Cancelled` on every rank when one of them stops, and what one of them met as `Refused`. All call it together."""
    found = mesh.largest(FAIL if failure else STOP if stop else GO_ON)
    if found == FAIL:
        raise Refused(_first_told(mesh, "" if failure is None else str(failure))) from failure
    if found == STOP:
        raise Cancelled


def _first_told(mesh: Mesh, text: str) -> str:
    told = (
        [text] if mesh.control is None else map(json.loads, all_gather_bytes(json.dumps(text).encode(), mesh.control))
    )
    return next(filter(None, told))
