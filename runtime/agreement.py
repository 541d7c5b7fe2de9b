"""All ranks go on, stop or fail alike, so that none is left waiting for another and all hold the same afterwards."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from .errors import Cancelled, Refused
from .mesh import Mesh
from .parallel.collectives import all_gather_bytes

GO_ON, STOP, FAIL = range(3)


def agree(mesh: Mesh, *, stop: bool, failure: Exception | None = None) -> None:
    """Raise `Cancelled` on every rank when one of them stops, and what one of them met as `Refused`. All call it together."""
    agree_in(mesh.control, stop=stop, failure=failure)


def agree_in(group: dist.ProcessGroup | None, *, stop: bool, failure: Exception | None = None) -> None:
    """The same for the ranks of a group; None for this one alone."""
    found = torch.tensor([FAIL if failure else STOP if stop else GO_ON])
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    if found == FAIL:
        raise Refused(first_told(group, "" if failure is None else str(failure))) from failure
    if found == STOP:
        raise Cancelled


def first_told(group: dist.ProcessGroup | None, text: str) -> str:
    """The first text that a rank of the group has which is not empty, on each of them. All call it together."""
    told = [text] if group is None else map(json.loads, all_gather_bytes(json.dumps(text).encode(), group))
    return next(filter(None, told), "")
