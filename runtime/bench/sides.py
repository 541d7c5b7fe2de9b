"""The sides of a measurement, each in a process of its own with one thread, that tells its figures as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import Refused

PACK_ROOT = Path(__file__).resolve().parents[2]


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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    options = {"cwd": PACK_ROOT, "env": environment, "stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
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


def tell(figures: Any) -> None:
    """Tell the figures of this process to the one that runs it."""
    sys.stdout.write(json.dumps(figures) + "\n")


def resident_bytes(field: str) -> int:
    """Bytes of this process that are in memory, as Linux counts them: now (`VmRSS`) or at most (`VmHWM`)."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
