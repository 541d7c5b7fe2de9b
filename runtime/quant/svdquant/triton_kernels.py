"""SVDQuant in two kernels: inputs are smoothed, rounded and projected down in one reading of them; then the product of the
codes, with scales, low rank and bias in one writing of the output. The weights are read as they are packed.

Integers are multiplied as int8, group by group; E2M1 codes times their scales, of weights and inputs, are exact in 16
bits, and multiplied so (which every GPU since Ampere does, and Hopper, where no kernel for 4 bits runs).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_layout import code_word, down_place, micro_scale_place, scale_place, up_place

E2M1_MAX = tl.constexpr(6.0)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def nearest_even(x: tl.tensor) -> tl.tensor:
    """The nearest whole number, of two the even one; |x| < 2 ** 22."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23, whose neighbours are whole numbers apart


@triton.jit
def nearest_e2m1(x: tl.tensor) -> tl.tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with either sign, of two the one with the even code."""
    size = tl.abs(x)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    return tl.minimum(tl.maximum(nearest_even(x / step) * step, -E2M1_MAX), E2M1_MAX)


@triton.jit
def nearest_e4m3(x: tl.tensor) -> tl.tensor:
    """The nearest 8-bit float of numbers from 0 up, in float32: 3 bits after the first, steps of 2 ** -9 at least."""
    x = tl.minimum(x, E4M3_MAX)
    power = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    step = ((power + 127 - 3) << 23).to(tl.float32, bitcast=True)
    return nearest_even(x / step) * step


@triton.jit
def e4m3_value(byte: tl.tensor) -> tl.tensor:
    """What the byte of an 8-bit float from 0 up stands for. Ampere has no such number format."""
    power, fraction = (byte >> 3) & 15, (byte & 7).to(tl.float32)
    unit = ((tl.maximum(power, 1) + 127 - 10) << 23).to(tl.float32, bitcast=True)
    return tl.where(power == 0, fraction, fraction + 8.0) * unit


@triton.jit
def e2m1_value(code: tl.tensor) -> tl.tensor:
    """What a code from 0 to 15 stands for: a sign, two bits of exponent, one of mantissa."""
    power, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    unit = ((tl.maximum(power, 1) + 127 - 1) << 23).to(tl.float32, bitcast=True)
    size = tl.where(power == 0, half, 1.0 + half) * unit
    return tl.where(code < 8, size, -size)


@triton.jit
def round_inputs(
    x, smooth, down, codes, scales, low,
    rows, features,
    K: tl.constexpr, RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SHIFT: tl.constexpr, LARGEST: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`x (rows, features)` -> `low = x down^T (rows, RANKS)` float32, and 4-bit inputs `codes (rows, K)`: integers, with
    `scales (rows, K / GROUP)` beside them, or floats times theirs. K is padded; a program takes `BLOCK` rows.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANK_BLOCK)
    total = tl.zeros((BLOCK, RANK_BLOCK), tl.float32)
    there = row[:, None] < rows
    for start in range(0, K, 64):
        k = start + tl.arange(0, 64)
        within = there & (k[None, :] < features)
        inputs = tl.load(x + row[:, None].to(tl.int64) * features + k[None, :], mask=within, other=0.0)
        matrix = tl.load(down + down_place(rank[None, :], k[:, None], RANKS), mask=rank[None, :] < RANKS, other=0.0)
        total += tl.dot(inputs, matrix.to(inputs.dtype), input_precision="ieee")
        divisor = tl.load(smooth + scale_place(k, 0, 1)).to(tl.float32)
        smoothed = tl.where(within, tl.div_rn(inputs.to(tl.float32) + SHIFT, divisor[None, :]), 0.0)
        groups = tl.reshape(smoothed, (BLOCK, 64 // GROUP, GROUP))
        largest = tl.max(tl.abs(groups), axis=2)
        group = start // GROUP + tl.arange(0, 64 // GROUP)
        place = row[:, None].to(tl.int64) * K + k[None, :]
        if FLOAT:
            scale = nearest_e4m3(tl.div_rn(largest, LARGEST))
            rounded = nearest_e2m1(tl.div_rn(groups, tl.where(scale > 0, scale, 1.0)[:, :, None])) * scale[:, :, None]
        else:
            scale = tl.div_rn(largest, LARGEST)
            rounded = nearest_even(tl.div_rn(groups, tl.where(scale > 0, scale, 1.0)[:, :, None]))
            where = row[:, None].to(tl.int64) * (K // GROUP) + group[None, :]
            tl.store(scales + where, scale, mask=there)
        tl.store(codes + place, tl.reshape(rounded, (BLOCK, 64)).to(codes.dtype.element_ty), mask=there)
    tl.store(low + row[:, None] * RANKS + rank[None, :], total, mask=there & (rank[None, :] < RANKS))


@triton.jit
def weight_codes(
    qweight: tl.tensor, n: tl.tensor, tile_k: tl.tensor, K: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The 4-bit codes of `BLOCK_N` rows and the 64 columns of a tile: int32 from 0 to 15."""
    word = tile_k * 8 + tl.arange(0, 8)
    words = tl.load(qweight + code_word(n[:, None], word[None, :], K))
    nibbles = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    return tl.reshape(nibbles, (BLOCK_N, 64))


@triton.jit
def add_low_rank_and_bias(
    total, low, up, bias, row, n, rows, outputs,
    RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`total + low up^T + bias`."""
    rank = tl.arange(0, RANK_BLOCK)
    known = rank[None, :] < RANKS
    taken = tl.load(low + row[:, None] * RANKS + rank[None, :], mask=(row[:, None] < rows) & known, other=0.0)
    matrix = tl.load(up + up_place(n[None, :], rank[:, None], RANKS), mask=rank[:, None] < RANKS, other=0.0)
    total += tl.dot(taken.to(matrix.dtype), matrix, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def multiply_integers(
    codes, scales, low, qweight, wscales, up, bias, output,
    rows, outputs,
    K: tl.constexpr, RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`output (rows, outputs)` of inputs in 4-bit integers: a product in int8 for each group of 64."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    there = row < rows
    for tile_k in range(0, K // 64):
        k = tile_k * 64 + tl.arange(0, 64)
        place = row[:, None].to(tl.int64) * K + k[None, :]
        inputs = tl.load(codes + place, mask=there[:, None], other=0)
        weights = ((weight_codes(qweight, n, tile_k, K, BLOCK_N) ^ 8) - 8).to(tl.int8)
        product = tl.dot(inputs, tl.trans(weights), out_dtype=tl.int32).to(tl.float32)
        input_scale = tl.load(scales + row.to(tl.int64) * (K // 64) + tile_k, mask=there, other=0.0)
        weight_scale = tl.load(wscales + scale_place(n, tile_k, K // 64)).to(tl.float32)
        total += product * input_scale[:, None] * weight_scale[None, :]
    total = add_low_rank_and_bias(total, low, up, bias, row, n, rows, outputs, RANKS, RANK_BLOCK, HAS_BIAS)
    place = row[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=there[:, None] & (n[None, :] < outputs))


@triton.jit
def multiply_floats(
    inputs, low, qweight, wscales, tensor_scale, channel_scales, up, bias, output,
    rows, outputs,
    K: tl.constexpr, RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_TENSOR_SCALE: tl.constexpr, HAS_CHANNEL_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`output (rows, outputs)` of inputs in E2M1 floats times their scales, which 16 bits hold exactly."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    there = row < rows
    for tile_k in range(0, K // 64):
        k = tile_k * 64 + tl.arange(0, 64)
        taken = tl.load(inputs + row[:, None].to(tl.int64) * K + k[None, :], mask=there[:, None], other=0.0)
        values = tl.reshape(e2m1_value(weight_codes(qweight, n, tile_k, K, BLOCK_N)), (BLOCK_N, 4, 16))
        group = tile_k * 4 + tl.arange(0, 4)
        step = e4m3_value(tl.load(wscales + micro_scale_place(n[:, None], group[None, :], K // 16)).to(tl.int32))
        scaled = tl.reshape(values * step[:, :, None], (BLOCK_N, 64))
        total += tl.dot(taken, tl.trans(scaled.to(taken.dtype)), input_precision="ieee")
    if HAS_TENSOR_SCALE:
        total *= tl.load(tensor_scale).to(tl.float32)
    if HAS_CHANNEL_SCALES:
        total *= tl.load(channel_scales + scale_place(n, 0, 1)).to(tl.float32)[None, :]
    total = add_low_rank_and_bias(total, low, up, bias, row, n, rows, outputs, RANKS, RANK_BLOCK, HAS_BIAS)
    place = row[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=there[:, None] & (n[None, :] < outputs))


@triton.jit
def multiply_awq(
    x, qweight, wscales, wzeros, bias, output,
    rows, outputs, scale_stride,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`output (rows, outputs)` of inputs in 16 bits and weights in 4: two codes in a byte, a scale and a zero for 64."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    there, known = row < rows, n < outputs
    for group in range(0, K // 64):
        k = group * 64 + tl.arange(0, 64)
        taken = tl.load(x + row[:, None].to(tl.int64) * K + k[None, :], mask=there[:, None], other=0.0)
        place = n[:, None].to(tl.int64) * (K // 2) + k[None, :] // 2
        pairs = tl.load(qweight + place, mask=known[:, None], other=0).to(tl.int32)
        codes = ((pairs >> (k % 2 * 4)[None, :]) & 15).to(tl.float32)
        scale = tl.load(wscales + n * scale_stride + group, mask=known, other=0.0).to(tl.float32)
        zero = tl.load(wzeros + n * scale_stride + group, mask=known, other=0.0).to(tl.float32)
        weights = codes * scale[:, None] + zero[:, None]
        total += tl.dot(taken, tl.trans(weights.to(taken.dtype)), input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[None, :]
    place = row[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=there[:, None] & known[None, :])
