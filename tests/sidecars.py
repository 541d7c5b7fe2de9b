"""Sidecars whose ranks pretend, and what the tests ask of them."""

from __future__ import annotations

import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from runtime.client import Sidecar
from runtime.protocol import Conditioning, Progress, Sample
from runtime.settings import ModelSettings, ParallelSettings, SampleSettings

FAKE_SERVER = (sys.executable, str(Path(__file__).with_name("fake_server.py")))


def never():
    return False


@contextmanager
def fake_sidecar(*, log=None, server=FAKE_SERVER):
    """A sidecar that is gone afterwards, with everything it started and made."""
    sidecar = Sidecar.start(log=log or (lambda line: None), command=server)
    try:
        yield sidecar
    finally:
        processes = family_of(sidecar)
        sidecar.close()
        assert not still_there(processes, within=5)
        assert not any(path.exists() for path in folders_of(sidecar))


def sample(model="fake", *, ranks=1, steps=3, shape=(1, 4, 2, 2), preview="none"):
    """A request for the pretended pipeline; its latent counts up, so that a mix-up shows."""
    return Sample(
        job=uuid.uuid4().hex,
        model=ModelSettings(model=model, parallel=ParallelSettings(devices=f"cpu:{ranks}")),
        settings=SampleSettings(steps=steps),
        positive=(Conditioning(embedding=torch.ones(1, 2, 3)),),
        latent=torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape),
        preview=preview,
    )


def run(sidecar, request, *, interrupted=never):
    """All events of a request."""
    return list(sidecar.call(request, interrupted=interrupted))


def steps_of(events, stage="sampling"):
    return [event.step for event in events if isinstance(event, Progress) and event.stage == stage]


def rank_pids(sidecar):
    return [rank.pid for rank in sidecar.status().ranks]


def family_of(sidecar):
    """The server's process and its ranks'."""
    if not sidecar.alive:
        return []
    server = psutil.Process(sidecar.status().pid)
    return [server, *server.children(recursive=True)]


def still_there(processes, *, within):
    """Which of the processes have not ended in that many seconds."""
    _, alive = psutil.wait_procs(processes, timeout=within)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def processor_seconds(processes):
    """What the processes have used so far; to the nanosecond where the system tells, else to the tick."""
    files = [path for process in processes for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    if files:
        return sum(int(path.read_text().split()[0]) for path in files) / 1e9
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def folders_of(sidecar):
    """Its folders on this machine: the sockets', and the shared memory's where there is one."""
    endpoint, shared = sidecar._process.where.endpoint, sidecar._pool._folder
    sockets = [Path(endpoint.removeprefix("ipc://")).parent] if endpoint.startswith("ipc://") else []
    return [*sockets, *([shared] if shared else [])]
