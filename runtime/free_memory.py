"""How much memory is free now: on a GPU, or in this machine or container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

MEMINFO, CGROUP, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Version(NamedTuple):
    """Of control groups: where they are under `CGROUP`, and what their files call limit, use and the unused cache."""

    folder: str
    limit: str
    used: str
    cache: str


VERSIONS = {
    "": Version(".", "memory.max", "memory.current", "inactive_file"),
    "memory": Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller that a line of `OWN_CGROUP` names: none for the second, and the first."""


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
    """By the limits of control groups: of the one that this process is in, and of those around it."""
    rooms = [_room_in(folder, version) for folder, version in _groups()]
    return min((room for room in rooms if room is not None), default=None)


def _groups() -> Iterator[tuple[Path, Version]]:
    """In a container the path may be the host's, which is not there; the container's own group is then the outermost."""
    for line in OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else ():
        _, controllers, path = line.split(":", 2)
        for controller in VERSIONS.keys() & controllers.split(","):
            root = CGROUP / VERSIONS[controller].folder
            own = root / path.strip("/")
            yield from ((folder, VERSIONS[controller]) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _room_in(folder: Path, version: Version) -> int | None:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (version.limit, version.used))
        kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - int(used) + int(kinds.get(version.cache, 0)))
