"""Which devices a plan is for. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .machine import Machine
from .needs import Needs
from .settings import ParallelSettings, formula


def kind_of(parallel: ParallelSettings, machine: Machine) -> str:
    """The kind of the devices, "cuda" or "cpu"."""
    if parallel.devices == "auto":
        return "cuda" if machine.cuda else "cpu"
    return parallel.devices.partition(":")[0]


def devices_of(parallel: ParallelSettings, machine: Machine) -> tuple[str, ...]:
    """The device of each rank. On auto with no degree set that is every GPU that can work with others: a ring takes any number."""
    cpu, count = kind_of(parallel, machine) == "cpu", parallel.product
    if parallel.devices != "auto":
        return ("cpu",) * parallel.device_count if cpu else tuple(f"cuda:{number}" for number in _numbers(parallel))
    if not parallel.set_degrees:
        count = max(machine.most_gpus, 1)
    return ("cpu",) * count if cpu else tuple(f"cuda:{number}" for number in range(count))


def on_gpus_of_use(
    parallel: ParallelSettings, machine: Machine, needs_on: Callable[[Sequence[str]], Needs]
) -> ParallelSettings:
    """The same with its GPUs by name, where it leaves everything open and not all are of use. `needs_on` says what the model
    needs of some: of the weights alone, so that all requests of a graph go to the same.
    """
    if parallel.devices != "auto" or parallel.set_degrees or not machine.cuda:
        return parallel
    devices = _holding_most(machine, needs_on)
    if devices == devices_of(parallel, machine):
        return parallel
    return ParallelSettings(devices=f"cuda:{','.join(device.removeprefix('cuda:') for device in devices)}")


def _holding_most(machine: Machine, needs_on: Callable[[Sequence[str]], Needs]) -> tuple[str, ...]:
    """The most GPUs that hold the weights between them, with room beside the weights if there are such: a small one beside
    larger ones is left out. All where none hold them.
    """
    for crowded in (0, 1):
        for devices in _sets(machine):
            needs = needs_on(devices)
            legal = needs.choices(len(devices), {})
            if legal and needs.crowded(legal[0].tensor) <= crowded:
                return devices
    return next(_sets(machine))


def _sets(machine: Machine) -> Iterator[tuple[str, ...]]:
    """The sets of GPUs that can work together, the most first: of each size the first ones, then the largest."""
    numbers = range(len(machine.cuda))
    largest = sorted(numbers, key=lambda number: -machine.cuda[number].memory_mib)
    for count in range(machine.most_gpus, 0, -1):
        for chosen in dict.fromkeys((tuple(numbers[:count]), tuple(sorted(largest[:count])))):
            yield tuple(f"cuda:{number}" for number in chosen)


def missing_gpus(parallel: ParallelSettings, machine: Machine) -> str:
    """Which of the GPUs are not there, in the user's words; empty when all are."""
    present = len(machine.cuda)
    has = f"this machine has {present or 'no'} GPU{'s'[: present != 1]}{machine.because}"
    if parallel.devices == "auto":
        needed = parallel.product
        return f"{formula(parallel.set_degrees)} = {needed} needs {needed} GPUs, but {has}" if needed > present else ""
    missing = [f"cuda:{number}" for number in _numbers(parallel) if number >= present]
    return f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not there: {has}" if missing else ""


def usable_gpus(parallel: ParallelSettings, machine: Machine) -> list[int]:
    """The numbers of the GPUs a nearest plan may use first; none when it is to run on the processor."""
    present = range(len(machine.cuda))
    if kind_of(parallel, machine) == "cpu" or not present:
        return []
    if parallel.devices == "auto":
        return list(present)
    return [number for number in _numbers(parallel) if number in present] or list(present)[:1]


def _numbers(parallel: ParallelSettings) -> list[int]:
    return [int(number) for number in parallel.devices.removeprefix("cuda:").split(",")]
