"""The worker processes: one for each rank of a plan."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from .channel import Bell
from .forks import PACK_ROOT, Fork, Forks, can_fork, kill_group
from .heap import heap_environment
from .host_memory import Resident, resident_bytes
from .plan import Plan
from .protocol import Memory, RankReport
from .rank_settings import KeepSettings, RankSettings
from .settings import ParallelSettings

WORKER_MODULE = "runtime.worker"
WORKER = (sys.executable, "-m", WORKER_MODULE)
LAST_LINES = 15
_POSIX = os.name == "posix"

log = logging.getLogger("outrigger")


class Rank:
    """One worker process. Its standard input is its lifeline: the worker ends when that does."""

    def __init__(self, settings: RankSettings, *, process: subprocess.Popen[str] | Fork, bell: Bell) -> None:
        self.settings, self.ready, self.memory = settings, False, Memory()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = process
        self._reader = threading.Thread(target=self._log_lines, daemon=True)
        self._waiter = threading.Thread(target=self._await_end, args=(bell,), daemon=True)
        self._reader.start()
        self._waiter.start()
        self._tell_settings()

    @property
    def identity(self) -> bytes:
        """Its name on the socket, never used twice."""
        return self.settings.identity.encode()

    @property
    def exit_status(self) -> int | None:
        """How it ended, None while it runs."""
        return self._process.returncode

    def report(self) -> RankReport:
        """This rank as `Status` tells of it."""
        pid, place = self._process.pid, self.settings
        resident = self.resident.all
        return RankReport(
            rank=place.rank, pid=pid, device=place.device_name, memory=self.memory, resident_bytes=resident
        )

    @property
    def resident(self) -> Resident:
        """What the process has in memory."""
        return resident_bytes(self._process.pid)

    def kill(self) -> None:
        """End the process with everything it started. It has nothing to save."""
        if not _POSIX:
            self._process.kill()
        elif self._process.pid:
            kill_group(self._process.pid)

    def join(self, seconds: float) -> None:
        """Wait until it has ended and its last lines are read."""
        self._waiter.join(seconds)

    def _tell_settings(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self.settings.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it ended at once: the waiter says so

    def _log_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_lines.append(line.rstrip())
            log.info("rank %d: %s", self.settings.rank, line.rstrip())

    def _await_end(self, bell: Bell) -> None:
        self._process.wait()
        self._reader.join(0.5)  # its last lines say why; a process it started may hold the pipe open for longer
        bell.ring(f"{ENDED}{self.settings.identity}")


ENDED = "ended "
"""What a rank's end rings the bell with, followed by its identity."""


class Ranks:
    """The processes of one plan, started together and stopped together."""

    def __init__(
        self,
        plan: Plan,
        *,
        endpoint: str,
        token: str,
        home: Path,
        pool: Path | None,
        command: Sequence[str],
        bell: Bell,
        keep: KeepSettings,
    ) -> None:
        self.devices, self._pool = plan.devices, pool
        self.plan = plan
        """Of what is run: it may be that of another mesh, or of the first process alone."""
        self.degrees = plan.degrees
        """Of the mesh that they stand in now."""
        self._name = secrets.token_hex(4)
        self._store = home / f"store-{self._name}"
        environment = rank_environment(plan, os.environ)
        forked = command == WORKER and can_fork(plan.devices)
        self._forks = Forks(WORKER_MODULE, plan.world, environment=environment) if forked else None
        started = self._forks.all if self._forks else [_started(command, environment) for _ in range(plan.world)]
        self.all = [
            Rank(
                RankSettings(
                    rank=rank,
                    devices=_local_devices(plan),
                    names=plan.devices,
                    parallel=ParallelSettings(**plan.degrees),
                    endpoint=endpoint,
                    identity=f"{self._name}-{rank}",
                    token=token,
                    store=str(self._store),
                    pool=pool.name if pool else "",
                    keep=keep,
                ),
                process=process,
                bell=bell,
            )
            for rank, process in enumerate(started)
        ]

    def by_identity(self, identity: bytes) -> Rank | None:
        """The rank of that name; None for one of an earlier plan."""
        return next((rank for rank in self.all if rank.identity == identity), None)

    @property
    def working(self) -> list[Rank]:
        """Those that the plan is run on."""
        return self.all[: self.plan.world]

    @property
    def idle(self) -> list[Rank]:
        """The others."""
        return self.all[self.plan.world :]

    @property
    def resident_bytes(self) -> int:
        """What the system gets back when they end; what they share counts once."""
        each = [rank.resident for rank in self.all]
        own = self._forks.own_bytes if self._forks else sum(resident.own for resident in each)
        return own + max(resident.shared for resident in each)

    @property
    def ready(self) -> int:
        """How many have joined."""
        return sum(rank.ready for rank in self.all)

    def stop(self) -> None:
        """Kill them all and remove what they leave. Their results that are being read stay readable."""
        for rank in self.all:
            rank.kill()
        if self._forks:
            self._forks.end()
        for rank in self.all:
            rank.join(5.0)
        self._store.unlink(missing_ok=True)
        for segment in self._pool.glob(f"{self._name}-*") if self._pool else ():
            segment.unlink(missing_ok=True)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command),
        cwd=PACK_ROOT,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=_POSIX,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def rank_environment(plan: Plan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of the ranks' processes: what the server has, and what the plan says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        **inherited,
        "CUDA_DEVICE_ORDER": inherited.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "CUDA_VISIBLE_DEVICES": ",".join(_visible_ids(plan, inherited)),
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", str(max(1, cores // plan.world))),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        **(heap_environment(inherited) if set(plan.devices) == {"cpu"} else {}),
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }


def _visible_ids(plan: Plan, inherited: Mapping[str, str]) -> list[str]:
    """The plan counts among the devices that the server sees, which may be some of the machine's."""
    numbers = [int(device.partition(":")[2]) for device in plan.devices if device.startswith("cuda")]
    seen = [name for name in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [seen[number] if seen else str(number) for number in numbers]


def _local_devices(plan: Plan) -> tuple[str, ...]:
    return tuple(f"cuda:{rank}" if device.startswith("cuda") else "cpu" for rank, device in enumerate(plan.devices))
