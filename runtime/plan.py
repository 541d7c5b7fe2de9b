"""Settings + model + machine -> the legal plan, or why there is none and the nearest that is. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .comparison import tolerance_for
from .degrees import Degrees
from .errors import Refused
from .experts import inspect_settings
from .footprint import ON_DEVICE
from .forks import process_bytes
from .inspection import ModelFacts
from .lora.size import Added, added_by
from .machine import Machine
from .needs import MOST_BRANCHES, USUAL_BRANCHES, Needs
from .parts import check_offload, check_parts
from .plan_devices import devices_of, kind_of, missing_gpus, on_gpus_of_use, usable_gpus
from .protocol import Sample, Work
from .reason import reason_of
from .settings import AXES, MAX_DEGREE, MemorySettings, ModelSettings, ParallelSettings, formula
from .smaller import Smaller, smaller_that_fits
from .stored import GROUPS
from .units import in_units
from .without_spec import pipeline_without_spec, plan_alone
from .workload import Workload

MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """The degree of each axis and the device of each rank (`cpu` or `cuda:N`), outermost axis first.

    `bytes_per_rank` is what the weights of the rank that holds most take on its device, and `activation_bytes` what it works
    with in a step beside them; 0 where that is not known. `host_bytes` is what all ranks together take of host memory, but
    for pages of files. `tolerance` is how far a latent may be from one rank's, as a relative error.
    """

    data: int
    cfg: int
    ring: int
    ulysses: int
    tensor: int
    devices: tuple[str, ...]
    reason: str = ""
    bytes_per_rank: int = 0
    activation_bytes: int = 0
    host_bytes: int = 0
    tolerance: float = 0.0

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(self.degrees.values())

    @property
    def peak_bytes(self) -> int:
        """The most that a rank holds in a step; 0 where that is not known."""
        return self.bytes_per_rank + self.activation_bytes if self.bytes_per_rank and self.activation_bytes else 0

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def can_use(self, devices: tuple[str, ...]) -> bool:
        """Whether the processes on these devices can run it: all in a mesh of its degrees, or the first one alone."""
        return self.devices in (devices, devices[:1])


class PlanRefused(Refused):
    """No plan for these settings; `nearest` are settings that have one, None when nothing has. `smaller` is what the same
    degrees have memory for, where it was too small for what was asked.
    """

    def __init__(self, message: str, *, nearest: ParallelSettings | None, smaller: Smaller = Smaller()) -> None:
        self.nearest, self.smaller = nearest, smaller
        ways = [f"The nearest that fits: {smaller.words}"] if smaller.words else []
        ways += [f"The nearest plan that works: {_described(nearest)}"] if nearest else []
        super().__init__(". ".join((message, *ways)) if ways else f"{message}. No plan on this machine works")


@dataclass(frozen=True)
class Holding:
    """How weights are held, their number format ("auto" for the device's own) and which of them are on the device; what is
    sampled with them, where that is known; what LoRAs do to each expert; and what was added up of them.
    """

    dtype: str
    offload: MemorySettings
    workload: Workload | None
    added: tuple[tuple[Added, ...], ...]
    known: dict[tuple, Any] = field(default_factory=dict)


def plan_work(work: Work, machine: Machine) -> Plan:
    """The plan of a request: that of its model, with every rank of use. Raises as `plan_model`."""
    return plan_model(work.model, machine, workload=Workload.of(work) if isinstance(work, Sample) else None)


def plan_model(model: ModelSettings, machine: Machine, *, workload: Workload | None = None) -> Plan:
    """The plan of a model's settings. Raises as `make_plan`, and `Refused` for a model or a part that cannot be used."""
    if found := pipeline_without_spec(model.model):
        return Plan(1, 1, 1, 1, 1, **plan_alone(found, model, machine))
    return plan_facts(inspect_settings(model), model, machine, workload=workload)


def plan_facts(facts: ModelFacts, model: ModelSettings, machine: Machine, *, workload: Workload | None = None) -> Plan:
    """The same for a model whose facts are known."""
    check_parts(model, facts.spec)
    check_offload(facts, model.memory)
    held = {"offload": model.memory, "added": added_by(model.loras, facts)}
    return make_plan(model.parallel, facts, machine, dtype=model.dtype, workload=workload, **held)


def make_plan(
    parallel: ParallelSettings,
    facts: ModelFacts,
    machine: Machine,
    *,
    dtype: str = "auto",
    offload: MemorySettings = ON_DEVICE,
    workload: Workload | None = None,
    added: tuple[tuple[Added, ...], ...] = (),
) -> Plan:
    """The plan for these settings. Raises `PlanRefused` with formula, numbers and the nearest legal plan.

    A `workload` only rules out degrees that would leave ranks idle: all other requests of one graph have the same plan.
    """
    holding = Holding(dtype, offload, workload and workload.sampled_as(facts.spec.latent), added)
    weights = replace(holding, workload=None, added=())
    asked = parallel
    parallel = on_gpus_of_use(parallel, machine, lambda devices: _needs(facts, machine, devices, weights))
    problem = _problem(parallel, facts, machine, holding)
    if problem:
        raise PlanRefused(problem, nearest=_nearest(parallel, facts, machine, holding))
    devices = devices_of(parallel, machine)
    needs = _needs(facts, machine, devices, holding)
    chosen = needs.choices(len(devices), parallel.set_degrees)[0]
    if lack := needs.lack(chosen):
        most = machine.cores if machine.host.bounds_processes else 1  # more of them share the same memory
        nearest = _nearest(parallel, facts, machine, holding, most=most)
        raise PlanRefused(_too_large(needs, chosen, lack), nearest=nearest, smaller=smaller_that_fits(needs, chosen))
    return Plan(
        **vars(chosen),
        devices=devices,
        reason=reason_of(asked, needs, machine, devices, chosen),
        bytes_per_rank=needs.bytes_per_rank(chosen.tensor),
        activation_bytes=needs.activation_bytes(chosen),
        host_bytes=needs.host_bytes(chosen),
        tolerance=tolerance_for(needs.dtype, four_bit=any(stored.kind in GROUPS for stored in facts.stored.values())),
    )


def _needs(facts: ModelFacts, machine: Machine, devices: Sequence[str], holding: Holding) -> Needs:
    sizes = [machine.cuda[int(device.removeprefix("cuda:"))].memory_mib for device in devices if device != "cpu"]
    auto = "fp32" if "cpu" in devices else "bf16"
    dtype = auto if holding.dtype == "auto" else holding.dtype
    memory = min(sizes, default=0) * MIB
    held = (holding.offload, holding.workload, holding.added)
    host = machine.host.beside(process_bytes(devices))  # those that run already count as free
    return Needs(facts, dtype, memory, *held, devices=tuple(devices), host=host, known=holding.known)


# What is wrong ------------------------------------------------------------------------------------------------------


def _problem(parallel: ParallelSettings, facts: ModelFacts, machine: Machine, holding: Holding) -> str:
    """What is wrong with the settings, in the user's words; empty when nothing is."""
    wrong = Needs(facts, workload=holding.workload).problem(parallel.set_degrees)
    if wrong:
        return wrong
    if kind_of(parallel, machine) == "cuda" and (missing := missing_gpus(parallel, machine)):
        return missing
    devices = devices_of(parallel, machine)
    if devices[0] != "cpu" and len(devices) > 1 and not machine.has_nccl:
        return (
            f"{len(devices)} GPUs talk to each other through NCCL, which torch has on Linux alone: run ComfyUI there (on "
            f"Windows in WSL 2)"
        )
    if len(devices) > MAX_DEGREE:
        asked = f"{_formula(parallel)} = {len(devices)}" if parallel.devices == "auto" else parallel.devices
        return f"{asked} is more than {MAX_DEGREE} ranks"
    needs = _needs(facts, machine, devices, holding)
    if not needs.choices(len(devices), parallel.set_degrees):
        return _does_not_fill(parallel, needs, len(devices))
    return ""


def _does_not_fill(parallel: ParallelSettings, needs: Needs, count: int) -> str:
    """Why no degrees with those that are set make the number of devices."""
    product = f" = {parallel.product}" if len(parallel.set_degrees) > 1 else ""
    text = f"{parallel.devices} is {count} device{'s'[: count > 1]}, but {_formula(parallel)}{product}"
    if count % parallel.product:
        return f"{text}, and {count} is no multiple of {parallel.product}"
    return f"{text}, and the degrees left open ({needs.limits}) do not make it {count}"


def _too_large(needs: Needs, degrees: Degrees, lack: str) -> str:
    """What the ranks need, and which memory is too small for it."""
    work = needs.activation_bytes(degrees)
    return (
        f"the weights of {needs.facts.name} take {in_units(needs.bytes_per_rank(degrees.tensor))} on each rank at tensor "
        f"{degrees.tensor}{f' and a step {in_units(work)} more' if work else ''}, but {lack}"
    )


# The way out --------------------------------------------------------------------------------------------------------


def _nearest(
    parallel: ParallelSettings, facts: ModelFacts, machine: Machine, holding: Holding, *, most: int = 1
) -> ParallelSettings | None:
    """Settings with a plan: as near as can be in the number of devices, then in the degrees that were set. On the processor
    that is no more ranks than are wanted, or than `most`.
    """
    wanted = min(len(devices_of(parallel, machine)), MAX_DEGREE)
    usable = usable_gpus(parallel, machine)
    largest = sorted(range(len(machine.cuda)), key=lambda number: -machine.cuda[number].memory_mib)
    lists = (usable, range(len(machine.cuda)), largest) if usable else ((),)
    for numbers in dict.fromkeys(map(tuple, lists)):
        ranks = min(len(numbers), machine.most_gpus) if usable else max(wanted, min(most, MAX_DEGREE))
        for count in sorted(range(1, ranks + 1), key=lambda count: abs(count - wanted)):
            devices = [f"cuda:{number}" for number in numbers[:count]] if usable else ["cpu"] * count
            needs = _needs(facts, machine, devices, holding)
            legal = needs.choices(count, {}, branches=max(USUAL_BRANCHES, min(parallel.cfg, MOST_BRANCHES)))
            fitting = [degrees for degrees in legal if not needs.lack(degrees)]
            if fitting:
                return _settings(parallel, devices, min(fitting, key=lambda degrees: _change(parallel, degrees)))
    return None


def _change(parallel: ParallelSettings, degrees: Degrees) -> float:
    """How far degrees are from the ones that were set. Of equally near ones the first in the list is the best."""
    return sum(abs(math.log(degrees.degree(axis) / degree)) for axis, degree in parallel.set_degrees.items())


def _settings(parallel: ParallelSettings, devices: Sequence[str], degrees: Degrees) -> ParallelSettings:
    first = [f"cuda:{number}" for number in range(len(devices))]
    if parallel.devices == "auto" and devices in (first, ["cpu"] * len(devices)):
        named = "auto"
    elif devices[0] == "cpu":
        named = f"cpu:{len(devices)}"
    else:
        named = f"cuda:{','.join(device.removeprefix('cuda:') for device in devices)}"
    return ParallelSettings(devices=named, **vars(degrees))


# In words -----------------------------------------------------------------------------------------------------------


def _formula(parallel: ParallelSettings) -> str:
    return formula(parallel.set_degrees) or "no degree set"


def _described(parallel: ParallelSettings) -> str:
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in parallel.set_degrees.items())
    return f"devices {parallel.devices}, {degrees}"
