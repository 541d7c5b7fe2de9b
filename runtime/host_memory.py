"""How much of the memory of this machine, or of this container, is free now, and what bounds a process. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows bounds a process in other ways
    resource = None  # type: ignore[assignment]

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


class Resident(NamedTuple):
    """Bytes of a process: in `all`, of its `own`, and `shared` with others that are of no file."""

    all: int = 0
    own: int = 0
    shared: int = 0


@dataclass(frozen=True)
class HostMemory:
    """Bytes that programs may take: `free` all together, beside what they have; `address_space` each, with what is mapped
    from files, and `data` each of its own. None where that is not known, or has no bound.
    """

    free: int | None = None
    address_space: int | None = None
    data: int | None = None

    @classmethod
    def here(cls, *, freed: int = 0) -> HostMemory:
        """Of this machine or container, and of processes that this one starts. `freed` is what will be let go of."""
        known = _known() if MEMINFO.is_file() else []  # elsewhere the cache of files counts as taken
        free = min(known) + freed if known else None
        return cls(free, address_space=_bound("RLIMIT_AS"), data=_bound("RLIMIT_DATA"))

    def beside(self, taken: int) -> HostMemory:
        """What there is once so much more has been taken."""
        return self if self.free is None else replace(self, free=max(0, self.free - taken))

    @property
    def bounds_processes(self) -> bool:
        """Whether there is less for a process than for all of them."""
        return self.address_space is not None or self.data is not None


UNKNOWN = HostMemory()


def resident_bytes(pid: int) -> Resident:
    """What a process has in memory; nothing where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Resident(*(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssShmem")))
    except (OSError, KeyError, ValueError, IndexError):
        return Resident()


def free_host_bytes() -> int:
    """What programs may still take of this machine's memory, or of this container's; 0 where that is not known. The cache
    of files counts as free.
    """
    return min(_known(), default=0)


def _known() -> list[int]:
    return [size for size in (_of_machine(), _of_container()) if size is not None]


def _bound(name: str) -> int | None:
    """What the system allows a process, as `ulimit` sets it."""
    if resource is None or not hasattr(resource, name):
        return None
    allowed, _ = resource.getrlimit(getattr(resource, name))
    return None if allowed == resource.RLIM_INFINITY else allowed


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
