"""The server's process, as its host starts, watches and ends it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from .errors import SidecarError
from .folders import sweep_all
from .protocol import Address

PACK_ROOT = Path(__file__).resolve().parent.parent
SERVER = (sys.executable, "-m", "runtime", "serve", "--stdin-guard")
START_SECONDS = 60.0
CLOSE_SECONDS = 3.0
LAST_LINES = 15
_POSIX = os.name == "posix"


class Process:
    """The server's process: its standard input is its lifeline, its lines go to `log`."""

    def __init__(self, command: Sequence[str], *, log: Callable[[str], None]) -> None:
        self.log = log
        self.where: Address | None = None
        self._first: queue.Queue[Address | None] = queue.Queue()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            list(command),
            cwd=PACK_ROOT,
            env=server_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=_POSIX,  # Ctrl-C in the terminal is the host's alone
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def address(self) -> Address:
        """Where it listens, once it does. Raises `SidecarError` with its last lines when it ends before."""
        try:
            address = self._first.get(timeout=START_SECONDS)
        except queue.Empty:
            raise SidecarError(f"the sidecar did not start within {START_SECONDS:.0f} s") from None
        if address is None:
            raise SidecarError(f"the sidecar did not start. {self._how_it_ended()}")
        self.where = address
        return address

    def check(self) -> None:
        """Raise `SidecarError` when it has ended."""
        if not self.alive:
            sweep_all()
            raise SidecarError(f"the sidecar has ended; the next prompt starts a new one. {self._how_it_ended()}")

    def end(self) -> None:
        """Close its lifeline, and kill it when it takes too long."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL) if _POSIX else self._process.kill()
            self._process.wait()

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        self._reader.join(0.5)
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"({how}) Its last lines:\n" + "\n".join(self._last_lines)

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            address = _address_in(line) if self.where is None else None
            if address:
                self._first.put(address)
            else:
                self._last_lines.append(line.rstrip())
                self.log(line.rstrip())
        self._first.put(None)


def server_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The host's variables; our packages come first, and nothing is asked of a network."""
    others = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry]
    changed = {
        "PYTHONPATH": os.pathsep.join([str(PACK_ROOT), *others]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    return {name: value for name, value in {**inherited, **changed}.items() if name != "PYTHONSAFEPATH"}


def _address_in(line: str) -> Address | None:
    try:
        return Address.model_validate_json(line)
    except ValidationError:
        return None
