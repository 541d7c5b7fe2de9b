"""Settings + model + machine -> the legal plan, or why there is none and the nearest that is. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import Refused
from .inspection import ModelFacts
from .machine import Machine
from .settings import AXES, ParallelSettings

AVAILABLE = {"data": 1, "cfg": 2, "ring": 1, "tensor": 1}
"""The highest degree of each axis in this version; Ulysses is bounded by the heads."""


@dataclass(frozen=True)
class Plan:
    """The degree of each axis and the device of each rank (`cpu` or `cuda:N`), outermost axis first."""

    data: int
    cfg: int
    ring: int
    ulysses: int
    tensor: int
    devices: tuple[str, ...]
    reason: str = ""

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}


class PlanRefused(Refused):
    """No plan for these settings; `nearest` are settings that have one."""

    def __init__(self, message: str, *, nearest: ParallelSettings) -> None:
        self.nearest = nearest
        super().__init__(f"{message}. The nearest plan that works: {_described(nearest)}")


@dataclass(frozen=True)
class _Degrees:
    """A legal choice of degrees; the axes that are not there are 1."""

    cfg: int
    ulysses: int

    @property
    def product(self) -> int:
        return self.cfg * self.ulysses

    def degree(self, axis: str) -> int:
        return getattr(self, axis, 1)


def make_plan(parallel: ParallelSettings, facts: ModelFacts, machine: Machine) -> Plan:
    """The plan for these settings. Raises `PlanRefused` with formula, numbers and the nearest legal plan."""
    problem = _problem(parallel, facts, machine)
    if problem:
        raise PlanRefused(problem, nearest=_nearest(parallel, facts, machine))
    devices = _devices(parallel, facts, machine)
    chosen = _choices(parallel, facts, len(devices))[0]
    degrees = {axis: chosen.degree(axis) for axis in AXES}
    return Plan(**degrees, devices=devices, reason=_reason(parallel, facts, machine, devices, chosen))


def _problem(parallel: ParallelSettings, facts: ModelFacts, machine: Machine) -> str:
    """What is wrong with the settings, in the user's words; empty when nothing is."""
    for axis, most in AVAILABLE.items():
        degree = getattr(parallel, axis)
        if degree > most:
            return f"{axis} {degree} is not available in this version: set {axis} to {' or '.join('12'[:most])}"
    if parallel.ulysses and facts.heads % parallel.ulysses:
        return (
            f"ulysses {parallel.ulysses} does not divide the {facts.heads} attention heads of {facts.name}: "
            f"{parallel.ulysses} ranks for {facts.heads} heads"
        )
    count, kind = parallel.device_count, _kind(parallel, machine)
    if kind == "cuda" and (missing := _missing_gpus(parallel, machine)):
        return missing
    if count is not None and not _choices(parallel, facts, count):
        return (
            f"{parallel.devices} is {count} device{'s'[: count > 1]}, but {_formula(parallel)} = {parallel.product}, and "
            f"the degrees left open (ulysses a divisor of {facts.heads} heads, cfg 1 or 2) do not make it {count}"
        )
    return ""


def _kind(parallel: ParallelSettings, machine: Machine) -> str:
    if parallel.devices == "auto":
        return "cuda" if machine.cuda else "cpu"
    return parallel.devices.partition(":")[0]


def _missing_gpus(parallel: ParallelSettings, machine: Machine) -> str:
    present = len(machine.cuda)
    has = f"this machine has {present or 'no'} GPU{'s'[: present != 1]}"
    if parallel.devices == "auto":
        needed = parallel.product
        return f"{_formula(parallel)} = {needed} needs {needed} GPUs, but {has}" if needed > present else ""
    missing = [f"cuda:{number}" for number in _numbers(parallel) if number >= present]
    return f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not there: {has}" if missing else ""


def _numbers(parallel: ParallelSettings) -> list[int]:
    return [int(number) for number in parallel.devices.removeprefix("cuda:").split(",")]


def _devices(parallel: ParallelSettings, facts: ModelFacts, machine: Machine) -> tuple[str, ...]:
    """The device of each rank."""
    kind = _kind(parallel, machine)
    if parallel.devices != "auto":
        return ("cpu",) * parallel.device_count if kind == "cpu" else tuple(f"cuda:{n}" for n in _numbers(parallel))
    count = parallel.product
    if not parallel.set_degrees:
        usable = range(len(machine.cuda), 0, -1)
        count = next((count for count in usable if _choices(parallel, facts, count)), 1)
    return ("cpu",) * count if kind == "cpu" else tuple(f"cuda:{number}" for number in range(count))


def _choices(parallel: ParallelSettings, facts: ModelFacts, count: int) -> list[_Degrees]:
    """The legal degrees that use `count` devices and keep what is set; the most Ulysses first."""
    fitting = [
        degrees
        for degrees in _legal(facts)
        if degrees.product == count
        and all(degrees.degree(axis) == degree for axis, degree in parallel.set_degrees.items())
    ]
    return sorted(fitting, key=lambda degrees: -degrees.ulysses)


def _legal(facts: ModelFacts) -> Iterator[_Degrees]:
    for cfg in range(1, AVAILABLE["cfg"] + 1):
        for ulysses in range(1, facts.heads + 1):
            if facts.heads % ulysses == 0:
                yield _Degrees(cfg=cfg, ulysses=ulysses)


def _nearest(parallel: ParallelSettings, facts: ModelFacts, machine: Machine) -> ParallelSettings:
    """Settings with a plan: as near as can be in the number of devices, then in the degrees that were set."""
    wanted = parallel.device_count or parallel.product
    numbers = _usable_gpus(parallel, machine)
    most = len(numbers) if numbers else max(wanted, 1)

    def distance(degrees: _Degrees) -> tuple[float, float, int]:
        changed = (abs(math.log(degrees.degree(axis) / degree)) for axis, degree in parallel.set_degrees.items())
        return abs(degrees.product - wanted), sum(changed), -degrees.ulysses

    best = min((degrees for degrees in _legal(facts) if degrees.product <= most), key=distance)
    listed = ",".join(map(str, numbers[: best.product]))
    devices = f"cuda:{listed}" if numbers else f"cpu:{best.product}"
    if parallel.devices == "auto":
        devices = "auto"
    return ParallelSettings(devices=devices, **{axis: best.degree(axis) for axis in AXES})


def _usable_gpus(parallel: ParallelSettings, machine: Machine) -> list[int]:
    """The numbers of the GPUs a nearest plan may use; none when it is to run on the processor."""
    present = range(len(machine.cuda))
    if _kind(parallel, machine) == "cpu" or not present:
        return []
    if parallel.devices == "auto":
        return list(present)
    return [number for number in _numbers(parallel) if number in present] or list(present)[:1]


def _formula(parallel: ParallelSettings) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in parallel.set_degrees.items()) or "no degree set"


def _described(parallel: ParallelSettings) -> str:
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in parallel.set_degrees.items())
    return f"devices {parallel.devices}, {degrees}"


def _reason(
    parallel: ParallelSettings, facts: ModelFacts, machine: Machine, devices: tuple[str, ...], chosen: _Degrees
) -> str:
    """Why this plan, in a sentence or two."""
    count = len(devices)
    if parallel.devices == "auto" and not parallel.set_degrees:
        if not machine.cuda:
            return "No GPU: one process with all cores is as fast as several on a CPU"
        why = f"{count} of {len(machine.cuda)} GPU{'s'[: len(machine.cuda) > 1]}"
    else:
        why = f"{count} rank{'s'[: count > 1]} on {'the CPU' if devices[0] == 'cpu' else ', '.join(devices)}"
    if count == 1:
        return why
    idle = "; at cfg 1 both halves of the cfg axis do the same work" if chosen.cfg > 1 else ""
    return f"{why}: ulysses {chosen.ulysses} (of {facts.heads} heads) x cfg {chosen.cfg}{idle}"
