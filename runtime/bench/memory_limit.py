"""A hard limit on the memory of a process and of the files it reads: a control group of the Linux kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMITS = {"memory.limit_in_bytes": "memory", "memory.max": "."}
"""The file that sets the limit, and where under `ROOT` groups of its version are: the first, and the second."""


@contextmanager
def limited_group(limit: int) -> Iterator[Path | None]:
    """A group that holds no more than `limit` bytes, for as long as this lasts; None where the system makes none for us."""
    group = _made(limit)
    try:
        yield group
    finally:
        if group is not None:
            with suppress(OSError):
                group.rmdir()


def put_into(group: Path, pid: int) -> None:
    """Put a process into a group, which counts what it takes from then on."""
    (group / "cgroup.procs").write_text(str(pid))


def _made(limit: int) -> Path | None:
    for setting, place in LIMITS.items():
        group = ROOT / place / f"outrigger-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / setting).write_text(str(limit))
            return group
        except OSError:
            with suppress(OSError):
                group.rmdir()
    return None
