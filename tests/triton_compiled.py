"""The Triton kernels compiled for a GPU that need not be there, for a Linear of width 3072 and rank 32 in bf16."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.quant.svdquant import triton_kernels
from runtime.quant.svdquant.formats import INT4, NVFP4, Format

K, RANK = 3072, 32
HALF, SINGLE, SIZE = "*bf16", "*fp32", "i32"
SIZES = {"rows": SIZE, "outputs": SIZE}
RANKS = {"K": K, "RANKS": RANK, "RANK_BLOCK": RANK}
TILE = {"HAS_BIAS": True, "BLOCK_M": 64, "BLOCK_N": 128}


def compiled(capability: int) -> dict[str, Any]:
    """Each kernel by what it does; `capability` as in sm_90."""
    target = GPUTarget("cuda", capability, 32)
    return {name: triton.compile(source, target=target) for name, source in _sources().items()}


def _sources() -> dict[str, ASTSource]:
    low_rank = {"up": HALF, "bias": HALF, "output": HALF, **SIZES}
    integers = {"codes": "*i8", "scales": SINGLE, "low": SINGLE, "qweight": "*i32", "wscales": HALF, **low_rank}
    floats = {
        "inputs": HALF, "low": SINGLE, "qweight": "*i32", "wscales": "*u8", "tensor_scale": SINGLE,
        "channel_scales": HALF, **low_rank,
    }  # fmt: skip
    awq = {"x": HALF, "qweight": "*u8", "wscales": HALF, "wzeros": HALF, "bias": HALF, "output": HALF, **SIZES}
    scales = {"HAS_TENSOR_SCALE": True, "HAS_CHANNEL_SCALES": True}
    kernels = triton_kernels
    return {
        "round integers": _rounding(INT4, "*i8"),
        "round floats": _rounding(NVFP4, HALF),
        "multiply integers": _source(kernels.multiply_integers, integers, {**RANKS, **TILE}),
        "multiply floats": _source(kernels.multiply_floats, floats, {**RANKS, **TILE, **scales}),
        "multiply awq": _source(kernels.multiply_awq, {**awq, "scale_stride": SIZE}, {"K": K, **TILE, "BLOCK_M": 16}),
    }


def _rounding(form: Format, codes: str) -> ASTSource:
    tensors = {
        "x": HALF, "smooth": HALF, "down": HALF, "codes": codes, "scales": SINGLE, "low": SINGLE, "rows": SIZE,
        "features": SIZE,
    }  # fmt: skip
    constants = {"GROUP": form.group, "SHIFT": 0.0, "LARGEST": form.largest, "FLOAT": form.is_float, "BLOCK": 16}
    return _source(triton_kernels.round_inputs, tensors, {**RANKS, **constants})


def _source(kernel: Any, tensors: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, {**tensors, **dict.fromkeys(constants, "constexpr")}, places)
