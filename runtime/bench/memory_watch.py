"""What some processes take of the memory together, looked at all the while."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SAMPLED_SECONDS = 0.05
POLL_SECONDS = 0.001
AT_REST = "TZX"
"""States of a process that takes no memory: stopped or ended (proc_pid_stat(5))."""


class MemoryWatch:
    """Looks, in a thread, at the memory of the processes added to it; on Linux one clock is that of all of them.

    They stand still for each look: a page that one of them maps between the looks at two would be counted twice.
    """

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._seen: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def add(self, pid: int) -> None:
        """Watch this process too."""
        self._pids.append(pid)

    def most(self, began: float, ended: float) -> int:
        """The most bytes at a time between two times; 0 where nobody looked."""
        return max((taken for at, taken in self._seen if began <= at <= ended), default=0)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLED_SECONDS):
            with suppress(OSError, LookupError):  # one that has ended
                self._seen.append((time.monotonic(), together(tuple(self._pids))))


def together(pids: Sequence[int]) -> int:
    """Bytes in memory of some processes at one moment, a page that several map counted once."""
    with _stopped(pids):
        return sum(map(shared_once, pids))


def shared_once(pid: int) -> int:
    """Bytes of a process in memory, of a page that several processes map its share alone (Linux: Pss)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) * 1024


@contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    """Hold them for a moment."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            while _state(pid) not in AT_REST:
                time.sleep(POLL_SECONDS)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
