"""A model from its file onto two ranks, beside the plainest way to get a file into memory: reading it from start to end.

Two plans: `tensor`, where each rank reads and copies its half of the matrices, and `ulysses`, where both use the whole file
where it lies. A load has ended when all ranks have touched every page of every weight.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..folders import PrivateFolder, temporary_base
from ..mesh import Mesh
from ..pipeline import Pipeline
from ..progress import ignore_progress
from ..release import release_memory
from ..settings import ModelSettings
from ..units import in_units
from .memory_watch import MemoryWatch
from .offload import Size, write_model
from .sides import needs_proc, run_forks, tell

MODULE = "runtime.bench.load"
RANKS = 2
PLANS = ("tensor", "ulysses")
ROUNDS = 3
SIZE = replace(Size(), layers=27)
"""A Wan of 4 GB in float32."""
PAGE_BYTES = 4096
HELD_SECONDS = 2.0
"""How long ranks stay as they are, before and after a load, so that what they take is seen: to look at it takes a while."""


def measure(*, size: Size = SIZE, rounds: int = ROUNDS, held: float = HELD_SECONDS) -> dict[str, Any]:
    """Medians of seconds, and the most memory that the ranks took together at a time, a page that several map counted once.

    `seconds` and `peak_bytes` are those of the plan that has more; `base_bytes` the ranks take without a model (torch and
    diffusers). Time and memory are measured in runs of their own, since a look at the memory stops the ranks. Raises
    `Refused` where there is no /proc.
    """
    needs_proc("load")
    with PrivateFolder(temporary_base()) as folder:
        file_bytes = write_model(folder, size)
        timed = _run(str(folder), rounds=rounds, held=0.0)
        with MemoryWatch() as watch:
            watched = _run(str(folder), rounds=rounds, held=held, began=watch.add)
    seconds = {plan: statistics.median(end - start for start, end in timed[plan]) for plan in PLANS}
    peaks = {plan: max(watch.most(start, end + held) for start, end in watched[plan]) for plan in PLANS}
    return {
        "file_bytes": file_bytes,
        "seconds": max(seconds.values()),
        "sequential_read_seconds": statistics.median(timed["read"]),
        "peak_bytes": max(peaks.values()),
        "base_bytes": watch.most(*watched["base"]),
        "plans": {plan: {"seconds": seconds[plan], "peak_bytes": peaks[plan]} for plan in PLANS},
    }


def described(figures: dict[str, Any]) -> str:
    """The figures for a reader."""
    read, size, base = (figures[name] for name in ("sequential_read_seconds", "file_bytes", "base_bytes"))
    lines = [
        f"  {plan} {RANKS}: {each['seconds']:.2f} s, {each['seconds'] / read:.2f} times; peak {in_units(each['peak_bytes'])}, "
        f"{each['peak_bytes'] / size:.3f} times the file in all, {(each['peak_bytes'] - base) / size:.3f} without the ranks' own"
        for plan, each in figures["plans"].items()
    ]
    return "\n".join(
        [
            f"A file of {in_units(size)} is read from start to end in {read:.2f} s; loaded onto {RANKS} ranks, which take "
            f"{in_units(base)} without it:",
            *lines,
        ]
    )


def _run(folder: str, *, rounds: int, held: float, began: Callable[[int], None] = lambda pid: None) -> dict[str, Any]:
    """What the first rank tells of a run."""
    Path(folder, "store").unlink(missing_ok=True)
    task = {"folder": folder, "rounds": rounds, "held": held}
    return run_forks(MODULE, [{**task, "rank": rank} for rank in range(RANKS)], began=began)[0]


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
    release_memory()  # of what was loaded before, as between two models
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


def main() -> None:
    """One rank, in this process."""
    tell(_side(json.loads(sys.stdin.readline())))
