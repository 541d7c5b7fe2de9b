"""The core of a 4-bit Linear, by what multiplies with it: the one place that chooses."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from subprocess import SubprocessError

import torch
from torch import nn

from ..kernels import Kernels, has_triton, kernels_for, nunchaku_package
from ..parallel.shares import WHOLE, Cut
from ..stored import AWQ_INT4, FOUR_BIT, IN_TORCH, Stored
from .awq import AWQCore
from .core import Core
from .svdquant.core import SVDQuantCore

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TRIED_ON, TOLERANCE = 128, 0.02
"""Side of the Linear that kernels are tried on, and how far they may be from plain torch there, in 16 bits."""


def four_bit_core(linear: nn.Linear, cut: Cut, stored: Stored) -> Core:
    """A Linear whose weight is in 4 bits, for the kernels that `stored` names."""
    awq = stored.kind == AWQ_INT4
    if stored.kernels == IN_TORCH:
        return (AWQCore if awq else SVDQuantCore)(linear, cut, stored)
    module = import_module(f".svdquant.{stored.kernels}_core", __package__)  # needs a package that need not be there
    return (module.AWQ if awq else module.SVDQUANT)(linear, cut, stored)


def usable_kernels(kinds: Iterable[str], *, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The fastest kernels for a model of these kinds that work on this device; None where it has no 4-bit Linear.

    They are tried first: a package may be built for another torch, Triton may find no compiler, or a GPU may be new.
    """
    kinds = [kind for kind in dict.fromkeys(kinds) if kind in FOUR_BIT]
    if not kinds:
        return None
    *fast, plain = kernels_for(
        kinds,
        dtype=DTYPES[dtype],
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        nunchaku=nunchaku_package(),
        triton=has_triton(),
    )
    failures = []
    for kernels in fast:
        failure = _failure(kernels, [kind for kind in kinds if kind != AWQ_INT4], dtype, device)
        if not failure:
            return Kernels(kernels.name, "; ".join((*failures, *filter(None, [kernels.why]))), kernels.rest)
        failures.append(f"{kernels.name} {failure}")
    return Kernels(IN_TORCH, "; ".join((*failures, *filter(None, [plain.why]))))


def _failure(kernels: Kernels, kinds: Iterable[str], dtype: torch.dtype, device: torch.device) -> str:
    """What is wrong with kernels on a device; empty when they give the numbers of plain torch."""
    try:
        error = max((_error(kernels, kind, dtype, device) for kind in kinds), default=0.0)
    except _failures() as problem:
        said = str(problem).strip() or type(problem).__name__
        return f"does not work here ({said.splitlines()[0][:200]})"
    return "" if error <= TOLERANCE else f"gives other numbers here (relative error {error:.2g})"


def _failures() -> tuple[type[Exception], ...]:
    """What kernels may fail with that are of another version, for another torch, or for no GPU such as this one."""
    compiler = sys.modules.get("triton.errors")
    known = (AttributeError, ImportError, OSError, RuntimeError, SubprocessError, TypeError, ValueError)
    return known if compiler is None else (*known, compiler.TritonError)


@torch.inference_mode()
def _error(kernels: Kernels, kind: str, dtype: torch.dtype, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(TRIED_ON, TRIED_ON, generator=generator) for _ in range(2))
    outputs = []
    for stored in (Stored(kind), kernels.of(Stored(kind))):
        linear = nn.Linear(TRIED_ON, TRIED_ON, bias=False, dtype=dtype, device="meta")
        core = four_bit_core(linear, WHOLE, stored)
        core.place("weight", weight.to(device=device, dtype=dtype))
        outputs.append(core(x.abs().to(device=device, dtype=dtype), None).float())
    return float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
