"""Ranks that are forked from one process, seen from the server: each as `subprocess.Popen` shows a process of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .host_memory import resident_bytes

PACK_ROOT = Path(__file__).resolve().parent.parent
LIBRARIES_BYTES, RANK_BYTES = 450 << 20, 28 << 20
"""Of host memory, of no file: what torch and diffusers take where they are imported, and a rank beside them, with nothing
loaded. Seen on Linux with two cores, torch 2.14 and diffusers 0.42; a context of CUDA comes on top.
"""

log = logging.getLogger("outrigger")


class Fork:
    """One forked process: its number (0 before it is there), the ends of its pipes, and how it ended (None before)."""

    def __init__(self) -> None:
        self.pid, self.returncode = 0, None
        read, write = os.pipe()
        told, tell = os.pipe()
        self.ends = read, tell
        self.stdin = os.fdopen(write, "w", encoding="utf-8")
        self.stdout = os.fdopen(told, encoding="utf-8", errors="replace")
        self._ended = threading.Event()

    def wait(self) -> int | None:
        """How it ended, once it has."""
        self._ended.wait()
        return self.returncode

    def note_end(self, status: int) -> None:
        """It has ended so."""
        if not self._ended.is_set():
            self.returncode = status
            self._ended.set()


class Forks:
    """The process that forks, and what it forks: as many as asked for, in which `main` of a module runs."""

    def __init__(self, module: str, count: int, *, environment: Mapping[str, str]) -> None:
        self.all = [Fork() for _ in range(count)]
        ends = [end for fork in self.all for end in fork.ends]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.forked", module, *map(str, ends)],
            cwd=PACK_ROOT,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # numpy's starts threads when it is imported
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for end in ends:
            os.close(end)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """The number of the process that forks."""
        return self._process.pid

    @property
    def own_bytes(self) -> int:
        """What all of them have in memory of their own. What was there when they were forked counts once; where one has written
        to it since, that is left out, as it takes long to find out.
        """
        common = resident_bytes(self.pid).own
        return common + sum(max(0, resident_bytes(fork.pid).own - common) for fork in self.all)

    def end(self) -> None:
        """End it, where it has not forked all of them yet; those that are there are their owners' to end."""
        if any(not fork.pid for fork in self.all):
            self._process.kill()
            for fork in self.all:
                with suppress(OSError):  # its lifeline, for one of which we have not heard
                    fork.stdin.close()

    def kill(self) -> None:
        """End it and all that it has forked."""
        for fork in self.all:
            if fork.pid and fork.returncode is None:
                kill_group(fork.pid)
        self.end()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = _parsed(line)
            if told is None:
                log.info("the ranks: %s", line.rstrip())
            elif "pid" in told:
                self.all[told["rank"]].pid = told["pid"]
            else:
                self._note_end(self.all[told["rank"]], told["status"])
        status = self._process.wait()
        for fork in self.all:  # of which it could not tell any more
            if fork.returncode is None and fork.pid:
                kill_group(fork.pid)
            fork.note_end(status or 1)

    def _note_end(self, ended: Fork, status: int) -> None:
        """With the last of them goes what they had in common: whoever waits for it finds that memory free."""
        if all(fork.returncode is not None for fork in self.all if fork is not ended):
            self._process.wait()
        ended.note_end(status)


def kill_group(pid: int) -> None:
    """Kill a process with everything that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended already
        os.killpg(pid, signal.SIGKILL)


def can_fork(devices: Sequence[str]) -> bool:
    """Whether ranks on these devices are forked: several, on Linux, and on the processor alone, as no context of CUDA lives
    on in a fork.
    """
    return sys.platform == "linux" and len(devices) > 1 and set(devices) == {"cpu"}


def process_bytes(devices: Sequence[str]) -> int:
    """What the processes of ranks on these devices take of host memory before they hold a weight, at least."""
    imports = 1 if can_fork(devices) else len(devices)
    return imports * LIBRARIES_BYTES + len(devices) * RANK_BYTES


def _parsed(line: str) -> dict[str, int] | None:
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
