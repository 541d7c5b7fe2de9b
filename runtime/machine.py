"""What this machine has, found out without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

QUERY = ("--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that this process may use; its number is its place in `Machine.cuda`."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class Machine:
    """The devices ranks can run on."""

    cuda: tuple[CudaDevice, ...] = ()
    cores: int = 1

    @classmethod
    def here(cls) -> Machine:
        """This machine, as CUDA_VISIBLE_DEVICES and the installed torch let it be seen."""
        return cls(cuda=_visible_gpus(os.environ) if _torch_has_cuda() else (), cores=_cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _torch_has_cuda() -> bool:
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _visible_gpus(environment: Mapping[str, str]) -> tuple[CudaDevice, ...]:
    return visible(_nvidia_smi(), environment.get("CUDA_VISIBLE_DEVICES"))


def _nvidia_smi() -> str:
    """What nvidia-smi prints, one line per GPU; empty where there is none, or none that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible(listing: str, chosen: str | None) -> tuple[CudaDevice, ...]:
    """The GPUs of an nvidia-smi listing that CUDA_VISIBLE_DEVICES (`chosen`, None when not set) leaves.

    As in CUDA, entries are numbers or starts of UUIDs, and the first one that names no GPU ends the list. An instance of
    a divided GPU (MIG) is not in the listing and is believed.
    """
    by_number, by_uuid = {}, {}
    for line in filter(None, map(str.strip, listing.splitlines())):
        number, uuid, memory, name = (part.strip() for part in line.split(",", 3))
        device = CudaDevice(name=name, memory_mib=int(memory) if memory.isdigit() else 0)
        by_number[number], by_uuid[uuid] = device, device
    if chosen is None:
        return tuple(by_number.values())
    found = []
    for entry in filter(None, map(str.strip, chosen.split(","))):
        device = by_number.get(entry) or _by_start(by_uuid, entry)
        if device is None:
            break
        found.append(device)
    return tuple(found)


def _by_start(by_uuid: Mapping[str, CudaDevice], entry: str) -> CudaDevice | None:
    if entry.startswith("MIG-") and by_uuid:
        return CudaDevice(name="MIG instance", memory_mib=0)
    matches = [device for uuid, device in by_uuid.items() if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
