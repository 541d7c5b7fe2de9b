"""The sides of a measurement, each in a process of its own with one thread, that tells its figures as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..forks import PACK_ROOT, Forks
from ..heap import heap_environment

POLL_SECONDS = 0.02
MOST = 2000
"""Characters that an error shows of what a side has said."""


def needs_proc(suite: str) -> None:
    """Raise `Refused` where `resident_bytes` has nothing to read."""
    if not Path("/proc/self/clear_refs").exists():
        raise Refused(f"bench {suite} reads the memory of its processes from /proc: run it on Linux")


def run_sides(
    module: str, arguments: Sequence[Sequence[str]], *, began: Callable[[int], None] = lambda pid: None
) -> list[Any]:
    """What `python -m MODULE ARGUMENTS` tells in its last line, for each of the arguments; all of them run at once.

    `began` is given the number of each process. Raises `RuntimeError` when one of them fails.
    """
    options = {"cwd": PACK_ROOT, "env": _of_a_rank(), "stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    processes = [subprocess.Popen([sys.executable, "-m", module, *each], **options) for each in arguments]
    try:
        for process in processes:
            began(process.pid)
        printed = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a side of the bench ended with {[process.returncode for process in processes]}")
    return [json.loads(each.splitlines()[-1]) for each in printed]


def run_forks(module: str, tasks: Sequence[Any], *, began: Callable[[int], None]) -> list[Any]:
    """What `main` of a module tells of each task, which it reads as JSON; in processes that are forked from one, as the ranks
    of the sidecar are. `began` is given the number of each process. Raises `RuntimeError` when one of them fails.
    """
    forks = Forks(module, len(tasks), environment=_of_a_rank())
    began(forks.pid)
    try:
        for fork, task in zip(forks.all, tasks, strict=True):
            fork.stdin.write(json.dumps(task) + "\n")
            fork.stdin.flush()
        while any(not fork.pid and fork.returncode is None for fork in forks.all):
            time.sleep(POLL_SECONDS)
        for fork in forks.all:
            began(fork.pid)
        printed = [fork.stdout.read() for fork in forks.all]
        statuses = [fork.wait() for fork in forks.all]
    finally:
        forks.kill()
    if any(statuses):
        raise RuntimeError(
            f"a side of the bench ended with {statuses}:\n" + "\n".join(each[-MOST:] for each in printed)
        )
    return [json.loads(each.splitlines()[-1]) for each in printed]


def _of_a_rank() -> dict[str, str]:
    """The variables of a rank on one core."""
    return {**os.environ, **heap_environment(os.environ), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def say(line: str) -> None:
    """Say on standard error how far a measurement is."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def tell(figures: Any) -> None:
    """Tell the figures of this process to the one that runs it."""
    sys.stdout.write(json.dumps(figures) + "\n")


def resident_bytes(field: str) -> int:
    """Bytes of this process that are in memory, as Linux counts them: now (`VmRSS`) or at most (`VmHWM`)."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
