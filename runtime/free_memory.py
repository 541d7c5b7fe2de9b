"""How much memory is free now: on a GPU, or in this machine or container."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO, CGROUP, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_bytes(device: torch.device) -> int:
    """What is free on a device now, for this process; 0 where that is not known."""
    if device.type != "cuda":
        return free_host_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def free_host_bytes() -> int:
    """What programs may still take of this machine's memory, or of this container's; 0 where that is not known. The cache
    of files counts as free.
    """
    known = [size for size in (_of_machine(), _of_container()) if size is not None]
    return min(known, default=0)


def _of_machine() -> int | None:
    if MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    known = hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None


def _of_container() -> int | None:
    """By the limits of control groups, version 2."""
    try:
        own = next(line for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::"))
        group = CGROUP / own.removeprefix("0::").strip("/")
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, StopIteration, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - int(used) + int(kinds.get("inactive_file", 0)))
