"""What this machine has, found out without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from .host_memory import UNKNOWN, HostMemory

QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current,name", "--format=csv,noheader,nounits")
TIMEOUT_SECONDS = 20
_CUDA_BUILD = re.compile(r"^cuda\b[^=]*=\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that this process may use; its number is its place in `Machine.cuda`."""

    name: str
    memory_mib: int


MIG = CudaDevice(name="MIG instance", memory_mib=0)
"""A part of a divided GPU, of a size that is not known."""


@dataclass(frozen=True)
class Machine:
    """The devices ranks can run on.

    `has_nccl`: ranks on several GPUs can talk to each other. `why` says why there are no more GPUs, where that is known.
    `host` is what there is of host memory.
    """

    cuda: tuple[CudaDevice, ...] = ()
    cores: int = 1
    has_nccl: bool = True
    why: str = ""
    host: HostMemory = UNKNOWN

    @classmethod
    def here(cls) -> Machine:
        """This machine, as CUDA_VISIBLE_DEVICES and the installed torch let it be seen."""
        gpus, why = _visible_gpus(os.environ) if _torch_has_cuda() else ((), _without_cuda())
        return cls(gpus, cores=_cores(), has_nccl=sys.platform == "linux", why=why, host=HostMemory.here())

    @property
    def because(self) -> str:
        """The same behind a count of GPUs in a sentence."""
        return f" ({self.why})" if self.why else ""

    @property
    def most_gpus(self) -> int:
        """How many GPUs can work together."""
        return len(self.cuda) if self.has_nccl else min(len(self.cuda), 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA: by what it says of itself, or else by its version."""
    try:
        torch = metadata.distribution("torch")
        text = torch.locate_file("torch/version.py").read_text(encoding="utf-8")
    except metadata.PackageNotFoundError:
        return False
    except OSError:
        return not torch.version.endswith("+cpu")
    built = _CUDA_BUILD.search(text)
    return built is not None and built[1] != "None"


def _without_cuda() -> str:
    try:
        return (
            f"torch {metadata.version('torch')} is not built for CUDA; if there is an NVIDIA GPU, install one that is"
        )
    except metadata.PackageNotFoundError:
        return "torch is not installed"


def _visible_gpus(environment: Mapping[str, str]) -> tuple[tuple[CudaDevice, ...], str]:
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


def visible(listing: str, chosen: str | None) -> tuple[tuple[CudaDevice, ...], str]:
    """The GPUs of an nvidia-smi listing that CUDA_VISIBLE_DEVICES (`chosen`, None when not set) leaves, and why there are no
    more, where that is known.

    As in CUDA, entries are numbers or starts of UUIDs, the first one that names no GPU ends the list, and with one that is
    named twice there is none. Instances of a divided GPU (MIG) are not in the listing: one is believed, and CUDA shows a
    program no second one.
    """
    gpus = list(_listed(listing))
    if chosen is None:
        return _without_second_instance(device for _, _, device in gpus)
    entries = list(filter(None, map(str.strip, chosen.split(","))))
    named = list(_named(entries, gpus))
    if len({key for key, _ in named}) < len(named):
        return (), f"CUDA_VISIBLE_DEVICES {chosen} names a GPU twice, and CUDA then shows none"
    found, why = _without_second_instance(device for _, device in named)
    return found, why or _hidden(entries, [number for number, _, _ in gpus], shown=len(named))


def _hidden(entries: Sequence[str], numbers: Sequence[str], *, shown: int) -> str:
    """What CUDA_VISIBLE_DEVICES keeps from a program of the GPUs with these numbers; empty where that is none."""
    if shown >= len(numbers):
        return ""
    there = f"nvidia-smi lists {', '.join(numbers)}"
    if not entries:
        return f"CUDA_VISIBLE_DEVICES is set to nothing, which hides every GPU; {there}"
    if shown < len(entries):
        named = f"{entries[shown]}, which is no GPU here" + (", and hides what follows" if entries[shown + 1 :] else "")
        return f"CUDA_VISIBLE_DEVICES names {named}; {there}"
    return f"CUDA_VISIBLE_DEVICES {','.join(entries)} leaves {shown} of {len(numbers)}"


def _listed(listing: str) -> Iterator[tuple[str, str, CudaDevice]]:
    """Number, UUID and device of each line."""
    for line in filter(None, map(str.strip, listing.splitlines())):
        number, uuid, memory, divided, name = (part.strip() for part in line.split(",", 4))
        whole = CudaDevice(name=name, memory_mib=int(memory) if memory.isdigit() else 0)
        yield number, uuid, MIG if divided == "Enabled" else whole


def _named(entries: Iterable[str], gpus: list[tuple[str, str, CudaDevice]]) -> Iterator[tuple[str, CudaDevice]]:
    """What each entry names, until one names nothing: its UUID, and the device."""
    for entry in entries:
        if entry.startswith("MIG-") and gpus:
            yield entry, MIG
            continue
        fits = [(uuid, gpu) for number, uuid, gpu in gpus if entry == number or _starts(uuid, entry)]
        if len(fits) != 1:
            return
        yield fits[0]


def _starts(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


def _without_second_instance(devices: Iterable[CudaDevice]) -> tuple[tuple[CudaDevice, ...], str]:
    found: list[CudaDevice] = []
    for device in devices:
        if device == MIG and MIG in found:
            return tuple(found), "of GPUs that MIG divides CUDA shows a program one instance"
        found.append(device)
    return tuple(found), ""
