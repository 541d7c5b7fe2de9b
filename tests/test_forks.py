"""Ranks that are forked from one process which has imported the engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from runtime.bench.memory_watch import shared_once
from runtime.forks import Forks, can_fork, kill_group, process_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
WAIT = 120.0
MIB = 1 << 20
OWN = 100 * MIB
"""Most that a rank takes for itself; what it has imported is several times as much."""


def main() -> None:
    """A rank that tells where it stands, and ends as it is told."""
    told = sys.stdin.readline().split()
    import torch

    print(os.getpid(), os.getsid(0), "diffusers" in sys.modules, float(torch.ones(2, 2).mm(torch.ones(2, 2)).sum()))
    sys.stdout.flush()
    if told[0] == "wait":
        sys.stdin.readline()
    sys.exit(int(told[1]))


@pytest.fixture(scope="module")
def forks():
    forks = Forks("tests.test_forks", 3, environment={**os.environ, "OMP_NUM_THREADS": "4"})
    for fork, line in zip(forks.all, ("end 7", "wait 0", "wait 0"), strict=True):
        fork.stdin.write(f"{line}\n")
        fork.stdin.flush()
    yield forks
    forks.kill()


def test_each_is_a_process_of_its_own_with_its_own_pipes_and_its_own_end(forks):
    lines = [fork.stdout.readline().split() for fork in forks.all]
    _until(lambda: all(fork.pid for fork in forks.all))
    assert [line[0] for line in lines] == [line[1] for line in lines] == [str(fork.pid) for fork in forks.all]
    assert all(line[2:] == ["True", "8.0"] for line in lines)
    assert forks.all[0].wait() == 7
    first, second = forks.all[1:]
    assert len(os.listdir(f"/proc/{forks.pid}/task")) == 1, "a thread was there when it forked"
    assert all(_own(fork.pid) < OWN for fork in (first, second))
    assert shared_once(forks.pid) > sum(map(_own, (first.pid, second.pid)))
    taken = sum(_kibibytes(pid, "Pss_Anon") for pid in (forks.pid, first.pid, second.pid)) * 1024
    assert 0.8 < forks.own_bytes / taken < 1.02 and 0.8 < process_bytes(("cpu",) * 2) / taken < 1.2
    kill_group(first.pid)
    assert first.wait() == -9 and second.returncode is None
    second.stdin.close()
    assert second.wait() == 0
    assert not psutil.pid_exists(forks.pid), "what they have in common is still in memory"


def test_all_end_when_they_are_stopped_before_they_are_there():
    forks = Forks("tests.test_forks", 2, environment=dict(os.environ))
    forks.kill()
    assert all(fork.wait() for fork in forks.all)
    _gone(forks.pid)


def test_they_are_forked_where_no_context_of_cuda_is_lost():
    assert can_fork(("cpu", "cpu"))
    assert not can_fork(("cpu",)) and not can_fork(("cuda:0", "cuda:1"))


def _own(pid: int) -> int:
    """Bytes that a process alone has."""
    return (_kibibytes(pid, "Private_Dirty") + _kibibytes(pid, "Private_Clean")) * 1024


def _kibibytes(pid: int, name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines[name].split()[0])


def _gone(pid: int) -> None:
    _until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)
