"""Which failures more memory would have avoided, whoever tells of them, and in which words they are told. No torch."""

from __future__ import annotations

import errno
import re

from .host_memory import HostMemory
from .units import in_units

SAID = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|failed to map segment|std::bad_alloc|"
    r"\bMemoryError\b",
    re.IGNORECASE,
)
"""By torch's allocators, the system and what loads libraries there, safetensors, C++ and Python."""
_ALLOCATED = re.compile(r"tried to allocate ([0-9]+) bytes")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, here or in what this error was raised from."""
    while error is not None:
        if _is_one(error):
            return True
        error = error.__cause__
    return False


def _is_one(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return not isinstance(error, ValueError) and bool(SAID.search(str(error)))


def in_words(error: BaseException, *, device: str, offload: str) -> str:
    """What was asked for, what there is, and what to do, for work on a device with weights kept so."""
    asked = _ALLOCATED.search(str(error))
    what = f"tried to allocate {in_units(int(asked[1]))}" if asked else str(error) or type(error).__name__
    on_host = not device.startswith("cuda")
    host = HostMemory.here()
    there = "".join(f"; {each}" for each in _bounds(host)) if on_host else ""
    ways = ["a smaller picture", "fewer frames", "a smaller batch"]
    if on_host and offload != "disk":
        ways.append("offload disk (Configure Memory)")
    if on_host and host.bounds_processes:
        ways.append("a higher ulimit")
    if not on_host:
        ways += ["offload layerwise (Configure Memory)"] if offload == "none" else []
        ways.append("more devices")
    return f"out of memory on {device}: {what}{there}. Use {', '.join(ways[:-1])} or {ways[-1]}"


def _bounds(host: HostMemory) -> list[str]:
    found = [] if host.free is None else [f"{in_units(host.free)} of host memory are free"]
    found += [] if host.address_space is None else [f"a process may map {in_units(host.address_space)} (ulimit -v)"]
    return found + ([] if host.data is None else [f"a process may have {in_units(host.data)} (ulimit -d)"])
