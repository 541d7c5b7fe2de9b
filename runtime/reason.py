"""Why a plan is what it is, in the user's words. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from .degrees import Degrees
from .gain import saves_time
from .machine import Machine
from .needs import Needs
from .settings import ParallelSettings
from .units import in_units


def reason_of(
    parallel: ParallelSettings, needs: Needs, machine: Machine, devices: Sequence[str], chosen: Degrees
) -> str:
    """Why these devices and degrees, in a sentence or two; where one device would be faster, that it would; and what of the
    offload has no effect on them.
    """
    why = _choice(parallel, needs, machine, devices, chosen)
    if needs.offload.fetch == "gather" and chosen.ring * chosen.ulysses == 1:
        why += "; fetch gather has no effect: no ranks share the tokens of a picture (ulysses or ring)"
    return why


def _choice(parallel: ParallelSettings, needs: Needs, machine: Machine, devices: Sequence[str], chosen: Degrees) -> str:
    if parallel.devices == "auto" and not parallel.set_degrees and not machine.cuda:
        return f"No GPU{machine.because}: one process with all cores is as fast as several on a CPU"
    why = _devices_in_words(parallel, machine, devices)
    if len(devices) == 1:
        return why
    parts = [f"{why}: {chosen.formula} ({needs.facts.heads} heads)"]
    if chosen.cfg > 1:
        parts.append("at cfg 1 the cfg axis shares the tokens instead")
    if chosen.tensor > 1 and "tensor" not in parallel.set_degrees and not needs.fits(1):
        parts.append(f"the weights take {in_units(needs.bytes_per_rank(1))}, so that each rank holds a part of them")
    if devices[0] == "cpu":
        parts.append("one process with all cores is about as fast on a CPU")
    elif needs.facts.shapes and not saves_time(needs.facts, chosen, **needs.tokens):
        parts.append("one GPU may be faster: for so few tokens and features, exchanges take longer than what they save")
    return "; ".join(parts)


def _devices_in_words(parallel: ParallelSettings, machine: Machine, devices: Sequence[str]) -> str:
    count = len(devices)
    plural = "s"[: count > 1]
    if parallel.devices != "auto" or parallel.set_degrees:
        return f"{count} rank{plural} on {'the CPU' if devices[0] == 'cpu' else ', '.join(devices)}"
    if count < machine.most_gpus:
        return f"{count} GPU{plural} of {len(machine.cuda)} ({', '.join(devices)}): with more of them the weights do not fit"
    if count < len(machine.cuda):
        return (
            f"{count} GPU of {len(machine.cuda)}: they talk to each other through NCCL, which torch has on Linux alone"
        )
    return f"{count} GPU{plural}"
