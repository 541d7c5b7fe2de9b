"""A process that imports what ranks need, once, and forks them: their pages of it are then in memory once for all of them.

Half a GB of a rank is torch and diffusers. It runs as `python -m runtime.forked MODULE READ WRITE ...`, with the two pipe
ends of each rank, and tells in lines of JSON which process is which rank and how it ended. It starts no thread and touches
no GPU, as neither would live on in a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import diffusers.loaders
import diffusers.models.modeling_utils

from . import loading as loading  # the engine, with torch
from .release import give_back

BASES = (diffusers.loaders.FromOriginalModelMixin, diffusers.loaders.PeftAdapterMixin)
"""What every model class of diffusers brings in."""


def main(module: str, ends: Sequence[int]) -> None:
    """Fork one process for each pair of ends, where `main` of the module runs, and wait for all of them."""
    run = importlib.import_module(module).main
    gc.collect()
    give_back()
    gc.freeze()  # a collection would write to every object, and so copy its page
    ranks = {}
    for rank, (read, write) in enumerate(zip(ends[::2], ends[1::2], strict=True)):
        pid = os.fork()
        if not pid:
            _stand_alone(read, write, ends)
            return run()
        ranks[pid] = rank
        _tell(rank=rank, pid=pid)
    _close(ends)
    with suppress(BrokenPipeError):  # the server is gone: so are they, by their lifelines
        while ranks:
            pid, status = os.wait()
            _tell(rank=ranks.pop(pid), status=os.waitstatus_to_exitcode(status))
    os._exit(0)  # at once, as its memory is waited for


def _stand_alone(read: int, write: int, ends: Iterable[int]) -> None:
    """Be a process of its own: the leader of a group, with its own standard input and output."""
    os.setsid()
    os.dup2(read, 0)
    os.dup2(write, 1)
    os.dup2(write, 2)
    _close(ends)


def _close(ends: Iterable[int]) -> None:
    for end in ends:
        os.close(end)


def _tell(**what: int) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], [int(end) for end in sys.argv[2:]])
