"""What multiplies with 4-bit weights on a device, and why: decided without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from .stored import AWQ_INT4, IN_NUNCHAKU, IN_TORCH, IN_TRITON, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4, Stored

Capability = tuple[int, int]
"""Of a CUDA device, as NVIDIA numbers them: (9, 0) is Hopper."""
NUNCHAKU_INT4: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9))
NUNCHAKU_NVFP4: tuple[Capability, ...] = ((12, 0), (12, 1))
"""What the package's kernels are built for (github.com/nunchaku-tech/nunchaku, setup.py)."""
TURING: Capability = (7, 5)
TRITON: Capability = (8, 0)
"""From which on Triton multiplies in int8 and bf16."""
NOT_IN_NUNCHAKU = (SVDQUANT_INT4_UNSIGNED, AWQ_INT4)
"""Unsigned codes come from no kernel of that package but one that does a whole MLP; and modulation is held in plain order."""
IN_WORDS = {IN_TORCH: "plain torch", IN_TRITON: "Triton kernels", IN_NUNCHAKU: "the nunchaku kernels"}


@dataclass(frozen=True)
class Kernels:
    """What multiplies with the 4-bit weights of a model: `name`, and `rest` where that has no kernel for a kind of them.

    `why` says what stands in the way of the faster ones.
    """

    name: str
    why: str = ""
    rest: str = IN_TORCH

    def __str__(self) -> str:
        rest = f" (those after a GELU, and modulation, in {IN_WORDS[self.rest]})" if self.name == IN_NUNCHAKU else ""
        return f"4-bit Linears run in {IN_WORDS[self.name]}{rest}{': ' if self.why else ''}{self.why}"

    def of(self, stored: Stored) -> Stored:
        """A Linear as it is stored, with these for it."""
        name = self.rest if self.name == IN_NUNCHAKU and stored.kind in NOT_IN_NUNCHAKU else self.name
        return replace(stored, kernels=name, joined=tuple(self.of(part) for part in stored.joined))


def kernels_for(
    kinds: Iterable[str],
    *,
    dtype: str,
    capability: Capability | None,
    nunchaku: Literal["", "other", "kernels"],
    triton: bool,
) -> tuple[Kernels, ...]:
    """What can multiply with weights of these kinds on such a device (None: no CUDA device), the fastest first.

    `dtype` is that of the inputs, `nunchaku` what the package of that name is, `triton` whether there is one.
    """
    if capability is None:
        return (Kernels(IN_TORCH, "without CUDA there are no kernels for them"),)
    found, against = [], _against_nunchaku(SVDQUANT_NVFP4 in kinds, dtype, capability, nunchaku)
    has_triton = triton and capability >= TRITON
    if not against:
        found.append(Kernels(IN_NUNCHAKU, rest=IN_TRITON if has_triton else IN_TORCH))
    if has_triton:
        found.append(Kernels(IN_TRITON, against))
    missing = "Triton is not installed" if not triton else f"Triton needs a newer GPU than {_shown(capability)}"
    return (*found, Kernels(IN_TORCH, "; ".join(filter(None, (against, "" if has_triton else missing)))))


def kernels_here(kinds: Iterable[str], *, dtype: str, device: str) -> Kernels:
    """The fastest that should work on a device of this machine. It is tried when a model is loaded, not here."""
    capability = None
    if device.startswith("cuda"):
        import torch

        if torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(device)
    packages = {"nunchaku": nunchaku_package(), "triton": has_triton()}
    return kernels_for(kinds, dtype=dtype, capability=capability, **packages)[0]


def _against_nunchaku(is_float: bool, dtype: str, capability: Capability, nunchaku: str) -> str:
    """Why the nunchaku kernels cannot be used; empty when they can."""
    if nunchaku == "other":
        return "the package nunchaku that is installed is a statistics package of that name, not the kernels"
    if not nunchaku:
        return "the nunchaku kernels are not installed"
    if capability not in (NUNCHAKU_NVFP4 if is_float else NUNCHAKU_INT4):
        return f"nunchaku has no {'NVFP4' if is_float else 'INT4'} kernels for compute capability {_shown(capability)}"
    if dtype == "fp32" or (dtype == "bf16" and capability == TURING):
        return f"nunchaku does not take {dtype} on this GPU: set dtype to {'fp16' if capability == TURING else 'bf16'}"
    return ""


def _shown(capability: Capability) -> str:
    return ".".join(map(str, capability))


def nunchaku_package() -> Literal["", "other", "kernels"]:
    """What the module called nunchaku is: absent, another project's (as PyPI's is), or MIT HAN Lab's with its `ops`."""
    found = find_spec("nunchaku")
    if found is None:
        return ""
    places = found.submodule_search_locations or ()
    return "kernels" if any((Path(place) / "ops" / "gemm.py").is_file() for place in places) else "other"


def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
