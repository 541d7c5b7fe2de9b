"""What each kind of parallelism gains on two ranks, beside the bare diffusers class and diffusers' own parallelism.

Every side runs in the same two processes of one thread each, in turns, on the same weights.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from .parallel_sides import SIDES, Size, sent_at_least, write_model
from .sides import needs_proc, run_sides

ROUNDS = 5
RANKS = 2
RATIOS = {
    "ulysses2": ("one_rank", "ulysses2"),
    "ring2": ("one_rank", "ring2"),
    "tensor2": ("one_rank", "tensor2"),
    "cfg2": ("one_rank_cfg", "cfg2"),
    "one_rank_vs_diffusers": ("diffusers", "one_rank"),
    "ulysses2_vs_diffusers": ("diffusers_ulysses2", "ulysses2"),
    "ring2_vs_diffusers": ("diffusers_ring2", "ring2"),
}
"""How many times as fast as the first side the second one is."""


def measure(*, size: Size = Size(), rounds: int = ROUNDS) -> dict[str, Any]:
    """`cases` with the median seconds of a step of each side, their `ratios`, and what a rank sends and holds.

    `bytes_per_step` and `bytes_minimum` are of the rank that sends most, by kind. `rss_ratio_tensor2` is how much the
    peak of resident memory grows from an empty process to one that has loaded its part and run a step, against one rank.
    Raises `Refused` where there is no /proc.
    """
    needs_proc("parallel")
    with tempfile.TemporaryDirectory(prefix="outrigger-bench-") as home:
        folder = Path(home)
        write_model(folder, size)
        (folder / "size.json").write_text(json.dumps(vars(size)))
        memory = {name: _run(folder, f"memory {name}", ranks=len(ranks)) for name, ranks in _MEMORY.items()}
        told = _run(folder, f"time {rounds}", ranks=RANKS)
    return _figures(told, memory, size)


_MEMORY = {"one_rank": (0,), "tensor2": (0, 1)}


def described(figures: dict[str, Any]) -> str:
    """The figures for a reader."""
    lines = ["Median seconds of a step, one thread for each rank:"]
    lines += [f"  {case['name']:22} {case['ranks']} x {case['seconds']:.3f}" for case in figures["cases"]]
    lines.append("Times as fast:")
    lines += [f"  {name:22} {ratio:.3f}  ({'/'.join(RATIOS[name])})" for name, ratio in figures["ratios"].items()]
    lines.append("MiB that a rank sends in a step, and the least there can be:")
    lines += [
        f"  {name:22} {sent / 2**20:.2f}  {figures['bytes_minimum'][name] / 2**20:.2f}"
        for name, sent in figures["bytes_per_step"].items()
    ]
    whole = figures["rss_bytes"]["tensor2"]["peak"] / figures["rss_bytes"]["one_rank"]["peak"]
    lines.append(
        f"Peak of a rank's memory at tensor 2: {figures['rss_ratio_tensor2']:.3f} of one rank's, counted from when code and "
        f"libraries are loaded and have run once; {whole:.3f} with them"
    )
    return "\n".join(lines)


def _figures(told: list[dict[str, Any]], memory: dict[str, list[dict[str, Any]]], size: Size) -> dict[str, Any]:
    seconds = {name: statistics.median(times) for name, times in told[0]["seconds"].items()}
    grown = {name: max(each["peak"] - each["before"] for each in ranks) for name, ranks in memory.items()}
    sent = {name: max(each["sent"][name] for each in told) for name in told[0]["sent"]}
    return {
        "cases": [{"name": side.name, "ranks": side.ranks, "seconds": seconds[side.name]} for side in SIDES],
        "ratios": {name: seconds[slow] / seconds[fast] for name, (slow, fast) in RATIOS.items()},
        "bytes_per_step": sent,
        "bytes_minimum": sent_at_least(size),
        "rss_ratio_tensor2": grown["tensor2"] / grown["one_rank"],
        "rss_bytes": {name: max(ranks, key=lambda each: each["peak"]) for name, ranks in memory.items()},
        "rounds": len(told[0]["seconds"]["one_rank"]),
    }


def _run(folder: Path, task: str, *, ranks: int) -> list[dict[str, Any]]:
    """What each rank, a process of its own, tells at its end. Raises `RuntimeError` when one of them fails."""
    (folder / "store").unlink(missing_ok=True)
    given = [str(folder), str(ranks), *task.split()]
    return run_sides("runtime.bench.parallel_sides", [[*given, str(rank)] for rank in range(ranks)])
