"""A model from its file onto two ranks, beside the plainest way to get a file into memory: reading it from start to end.

Two plans: `tensor`, where each rank reads and copies its half of the matrices, and `ulysses`, where both use the whole file
where it lies. A load has ended when all ranks have touched every page of every weight.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..mesh import Mesh
from ..pipeline import Pipeline
from ..progress import ignore_progress
from ..settings import ModelSettings
from .offload import MIB, Size, write_model
from .sides import needs_proc, run_forks, tell

MODULE = "runtime.bench.load"
RANKS = 2
PLANS = ("tensor", "ulysses")
ROUNDS = 3
SIZE = replace(Size(), layers=27)
"""A Wan of 4 GB in float32."""
PAGE_BYTES = 4096
SAMPLED_SECONDS = 0.05
HELD_SECONDS = 2.0
"""How long ranks stay as they are, before and after a load, so that what they take is seen: to look at it takes a while."""


def measure(*, size: Size = SIZE, rounds: int = ROUNDS, held: float = HELD_SECONDS) -> dict[str, Any]:
    """Medians of seconds, and the most memory that the ranks took together at a time, a page that several map counted once.

    `seconds` and `peak_bytes` are those of the plan that has more; `base_bytes` the ranks take without a model (torch and
    diffusers). Raises `Refused` where there is no /proc.
    """
    needs_proc("load")
    watch = MemoryWatch()
    with tempfile.TemporaryDirectory(prefix="outrigger-bench-") as home:
        file_bytes = write_model(Path(home), size)
        task = {"folder": home, "rounds": rounds, "held": held}
        with watch:
            sides = run_forks(MODULE, [{**task, "rank": rank} for rank in range(RANKS)], began=watch.add)
    seconds = {plan: statistics.median(end - start for start, end in sides[0][plan]) for plan in PLANS}
    peaks = {plan: max(watch.most(start, end + held) for start, end in sides[0][plan]) for plan in PLANS}
    read = statistics.median(sides[0]["read"])
    return {
        "file_bytes": file_bytes,
        "seconds": max(seconds.values()),
        "sequential_read_seconds": read,
        "peak_bytes": max(peaks.values()),
        "base_bytes": watch.most(*sides[0]["base"]),
        "plans": {plan: {"seconds": seconds[plan], "peak_bytes": peaks[plan]} for plan in PLANS},
    }


def described(figures: dict[str, Any]) -> str:
    """The figures for a reader."""
    read, size, base = (figures[name] for name in ("sequential_read_seconds", "file_bytes", "base_bytes"))
    lines = [
        f"  {plan} {RANKS}: {each['seconds']:.2f} s, {each['seconds'] / read:.2f} times; peak {each['peak_bytes'] / MIB:.0f} MiB, "
        f"{each['peak_bytes'] / size:.3f} times the file in all, {(each['peak_bytes'] - base) / size:.3f} without the ranks' own"
        for plan, each in figures["plans"].items()
    ]
    return "\n".join(
        [
            f"A file of {size / MIB:.0f} MiB is read from start to end in {read:.2f} s; loaded onto {RANKS} ranks, which take "
            f"{base / MIB:.0f} MiB without it:",
            *lines,
        ]
    )


def _side(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: in each round the first reads the file while the others wait, then all load it on both plans."""
    torch.set_num_threads(1)
    folder, rank = Path(task["folder"]), task["rank"]
    meshes = {"tensor": Mesh.join({"tensor": RANKS}, rank=rank, device="cpu", init_method=f"file://{folder / 'store'}")}
    meshes["ulysses"] = Mesh.of_world({"ulysses": RANKS}, device="cpu")
    dist.barrier()
    began = time.monotonic()
    time.sleep(task["held"])
    found: dict[str, Any] = {"base": (began, time.monotonic()), "read": [], **{plan: [] for plan in PLANS}}
    for _ in range(task["rounds"]):
        dist.barrier()
        if rank == 0:
            found["read"].append(_seconds_to_read(folder))
        for plan in PLANS:
            found[plan].append(_load(folder, meshes[plan], held=task["held"]))
    dist.destroy_process_group()
    return found


def _seconds_to_read(folder: Path) -> float:
    [path] = folder.glob("*.safetensors")
    started = time.perf_counter()
    path.read_bytes()
    return time.perf_counter() - started


def _load(folder: Path, mesh: Mesh, *, held: float) -> tuple[float, float]:
    """When a load began, and when every rank had all its weights in memory, where they stay for a while."""
    settings = ModelSettings(model=str(folder), dtype="fp32")
    gc.collect()  # what was loaded before
    dist.barrier()
    began = time.monotonic()
    pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
    _touch(pipeline.transformer)
    dist.barrier()
    ended = time.monotonic()
    time.sleep(held)
    return began, ended


def _touch(model: nn.Module) -> None:
    """Read a number of each page."""
    for tensor in model.state_dict().values():
        tensor.view(-1)[:: PAGE_BYTES // tensor.itemsize].sum()


class MemoryWatch:
    """What some processes take together, looked at all the while; on Linux one clock is that of all of them."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._seen: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

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
                self._seen.append((time.monotonic(), together(self._pids)))


def together(pids: Sequence[int]) -> int:
    """Bytes of some processes, read there and back: while one maps a page that another has, the other's share of it falls."""
    return sum(shared_once(pid) for pid in (*pids, *reversed(pids))) // 2


def shared_once(pid: int) -> int:
    """Bytes of a process in memory, of a page that several processes map its share alone (Linux: Pss)."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) * 1024


def main() -> None:
    """One rank, in this process."""
    tell(_side(json.loads(sys.stdin.readline())))
