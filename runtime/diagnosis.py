"""What this machine has for the sidecar, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from .environment import check_environment
from .folders import SHARED_MEMORY
from .kernels import kernels_here, nunchaku_package
from .launch import PACK_ROOT
from .machine import Machine
from .pool import pool_limit
from .stored import SVDQUANT_INT4, SVDQUANT_NVFP4
from .units import in_units

TORCH = "torch>=2.6"
"""ComfyUI's, and so not in the list of requirements."""
KERNELS = ("flash-attn", "triton", "nunchaku")
"""Packages of kernels that a machine may have."""
SMALL_SHARED_MEMORY = 1 << 30
MIB = 1 << 20


def examine() -> dict[str, Any]:
    """Everything, as `--json` prints it; `ok` is false where something is missing that nothing runs without."""
    check_environment()
    machine, packages = Machine.here(), dict(_packages())
    missing = [text for text in packages.values() if not text["fits"]]
    return {
        "ok": not missing,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": machine.cores,
        "packages": packages,
        "devices": [vars(device) for device in machine.cuda],
        "peer_access": _peer_access(len(machine.cuda)),
        "kernels": {package: _version(package) for package in KERNELS},
        "four_bit": _four_bit(len(machine.cuda)),
        "shared_memory": _shared_memory(),
        "advice": [*_advice(machine, missing=bool(missing))],
    }


def described(found: dict[str, Any]) -> str:
    """The findings for a reader."""
    packages = [
        f"  {name:14} {each['version'] or 'missing'}{'' if each['fits'] else '  but needed: ' + each['wanted']}"
        for name, each in found["packages"].items()
    ]
    devices = [
        f"  cuda:{number} {each['name']}, {in_units(each['memory_mib'] * MIB)}"
        for number, each in enumerate(found["devices"])
    ]
    kernels = [f"  {name:14} {version or 'not installed'}" for name, version in found["kernels"].items()]
    memory = found["shared_memory"]
    return "\n".join(
        [
            f"Python {found['python']} on {found['system']}, {found['cores']} cores",
            "Packages:", *packages,
            "GPUs:" if devices else "GPUs: none; models run on the processor", *devices,
            *([f"GPUs that cannot reach each other's memory: {_pairs(found['peer_access'])}"] if devices[1:] else []),
            "Kernels:", *kernels,
            "SVDQuant:", *(f"  {line}" for line in found["four_bit"]),
            f"{SHARED_MEMORY}: {in_units(memory['bytes'])}, of which a process uses {in_units(memory['limit'])}",
            *([f"To do: {line}" for line in found["advice"]] or ["Nothing to do."]),
        ]
    )  # fmt: skip


def _packages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, version, what is wanted, and whether that fits, of each package that the sidecar needs."""
    from packaging.requirements import Requirement

    lines = (PACK_ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    for line in (TORCH, *(line for line in lines if line.strip() and not line.startswith("#"))):
        wanted = Requirement(line)
        version = _version(wanted.name)
        fits = version is not None and wanted.specifier.contains(version, prereleases=True)
        yield wanted.name, {"version": version, "wanted": str(wanted), "fits": fits}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _peer_access(count: int) -> list[list[bool]]:
    """Whether each GPU reaches the memory of each other one; empty where there are no two."""
    if count < 2:
        return []
    import torch

    reach = torch.cuda.can_device_access_peer
    return [[one == other or reach(one, other) for other in range(count)] for one in range(count)]


def _four_bit(count: int) -> list[str]:
    """What multiplies with 4-bit weights, on the processor or on each GPU."""
    devices = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    kinds = (SVDQUANT_INT4, SVDQUANT_NVFP4)
    return [
        f"{device}, {kind.removeprefix('svdquant-')}: {kernels_here([kind], dtype='bf16', device=device)}"
        for device in devices
        for kind in kinds
    ]


def _pairs(reach: list[list[bool]]) -> str:
    apart = [f"{one}-{other}" for one, row in enumerate(reach) for other, reached in enumerate(row) if not reached]
    return ", ".join(apart) or "none"


def _shared_memory() -> dict[str, int]:
    if not SHARED_MEMORY.is_dir():
        return {"bytes": 0, "limit": 0}
    status = os.statvfs(SHARED_MEMORY)
    return {"bytes": status.f_blocks * status.f_frsize, "limit": pool_limit()}


def _advice(machine: Machine, *, missing: bool) -> Iterator[str]:
    if missing:
        yield f'run "{sys.executable} -m pip install -r {PACK_ROOT / "requirements.txt"}"; torch is installed with ComfyUI'
    if machine.why:
        yield machine.why
    if len(machine.cuda) > machine.most_gpus:
        yield "GPUs talk to each other through NCCL, which torch has on Linux alone: use WSL 2 to have them work together"
    if SHARED_MEMORY.is_dir() and _shared_memory()["bytes"] < SMALL_SHARED_MEMORY:
        yield f"{SHARED_MEMORY} is small, so large tensors take a slower way: start Docker with --shm-size=8g"
    if nunchaku_package() == "other":
        yield (
            'the package "nunchaku" of PyPI is a statistics package and not the kernels of SVDQuant: run '
            f'"{sys.executable} -m pip uninstall nunchaku"'
        )
