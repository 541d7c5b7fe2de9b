"""What each kind of parallelism gains on two ranks, beside the bare diffusers class and diffusers' own parallelism.

Every side runs in the same two processes of one thread each, in turns, on the same weights.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from ..folders import PrivateFolder, temporary_base
from .parallel_sides import SIDES, Size, sent_at_least, write_model
from .sides import needs_proc, run_sides, say

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
    peak of resident memory grows from an empty process to one that has loaded its part and run a step, against one rank:
    medians of the rounds, each in fresh processes; `rss_grown` has them all. Raises `Refused` where there is no /proc.
    """
    needs_proc("parallel")
    with PrivateFolder(temporary_base()) as folder:
        write_model(folder, size)
        (folder / "size.json").write_text(json.dumps(vars(size)))
        memory = [_memory(folder, f"{number} of {rounds}") for number in range(1, rounds + 1)]
        told = _run(folder, f"time {rounds}", ranks=RANKS)
    return _figures(told, memory, size)


_MEMORY = {"one_rank": 1, "tensor2": RANKS}


def _memory(folder: Path, number: str) -> dict[str, dict[str, int]]:
    """Of each side the rank that grows most."""
    sides = {name: _run(folder, f"memory {name}", ranks=ranks) for name, ranks in _MEMORY.items()}
    largest = {name: max(ranks, key=_grown) for name, ranks in sides.items()}
    say(f"memory {number}, MiB: {', '.join(f'{name} {_grown(rank) >> 20}' for name, rank in largest.items())}")
    return largest


def _grown(rank: dict[str, int]) -> int:
    return rank["peak"] - rank["before"]


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
    spread = "; ".join(
        f"{name} {min(grown) >> 20} to {max(grown) >> 20} MiB" for name, grown in figures["rss_grown"].items()
    )
    lines.append(
        f"Peak of a rank's memory at tensor 2: {figures['rss_ratio_tensor2']:.3f} of one rank's ({spread}), counted from when "
        f"code and libraries are loaded and have run once; {whole:.3f} with them"
    )
    return "\n".join(lines)


def _figures(told: list[dict[str, Any]], memory: list[dict[str, dict[str, int]]], size: Size) -> dict[str, Any]:
    seconds = {name: statistics.median(times) for name, times in told[0]["seconds"].items()}
    grown = {name: [_grown(each[name]) for each in memory] for name in _MEMORY}
    sent = {name: max(each["sent"][name] for each in told) for name in told[0]["sent"]}
    return {
        "cases": [{"name": side.name, "ranks": side.ranks, "seconds": seconds[side.name]} for side in SIDES],
        "ratios": {name: seconds[slow] / seconds[fast] for name, (slow, fast) in RATIOS.items()},
        "bytes_per_step": sent,
        "bytes_minimum": sent_at_least(size),
        "rss_ratio_tensor2": statistics.median(grown["tensor2"]) / statistics.median(grown["one_rank"]),
        "rss_grown": grown,
        "rss_bytes": {name: max((each[name] for each in memory), key=lambda rank: rank["peak"]) for name in _MEMORY},
        "rounds": len(told[0]["seconds"]["one_rank"]),
    }


def _run(folder: Path, task: str, *, ranks: int) -> list[dict[str, Any]]:
    """What each rank, a process of its own, tells at its end. Raises `RuntimeError` when one of them fails."""
    (folder / "store").unlink(missing_ok=True)
    given = [str(folder), str(ranks), *task.split()]
    return run_sides("runtime.bench.parallel_sides", [[*given, str(rank)] for rank in range(ranks)])
