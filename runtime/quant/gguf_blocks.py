"""What the blocks of GGUF stand for, in float32 and in torch: number for number what the package `gguf` gives.

Format: github.com/ggml-org/ggml, ggml-common.h and ggml-quants.c. A block has one or two 16-bit scales, those of 256 numbers
scales of 4 or 6 bits for each 16 or 32 of them besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..stored import BLOCKS
from . import gguf_codebooks, gguf_grids
from .bits import fields, fields_by_byte, half


def dequantise(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """`(..., blocks * bytes)` uint8 -> `(..., blocks * elements)` float32."""
    block = BLOCKS[kind]
    numbers = READERS[kind](packed.reshape(-1, block.nbytes))
    return numbers.reshape(*packed.shape[:-1], packed.shape[-1] // block.nbytes * block.elements)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 32), dim=1)
    return codes.view(torch.int8).float() * half(scale)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 16), dim=1)
    return half(scale) * (fields(codes, 4).flatten(1).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, codes = blocks.split((2, 2, 16), dim=1)
    return half(scale) * fields(codes, 4).flatten(1).float() + half(least)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, high, codes = blocks.split((2, 4, 16), dim=1)
    return half(scale) * (_fifth_bits(codes, high).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, high, codes = blocks.split((2, 2, 4, 16), dim=1)
    return half(scale) * _fifth_bits(codes, high).float() + half(least)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes, scale, least = blocks.split((16, 64, 2, 2), dim=1)
    steps = half(scale) * (scales & 15).float()
    lows = half(least) * (scales >> 4).float()
    numbers = fields(codes.unflatten(1, (-1, 32)), 2).reshape(-1, 16, 16)
    return (steps[..., None] * numbers.float() - lows[..., None]).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high, codes, scales, scale = blocks.split((32, 64, 12, 2), dim=1)
    low_bits = fields(scales[:, :8], 4).flatten(1)
    high_bits = fields(scales[:, 8:], 2).flatten(1)
    steps = half(scale) * ((low_bits | high_bits << 4).float() - 32)
    numbers = fields(codes.unflatten(1, (-1, 32)), 2).reshape(-1, 16, 16).float()
    is_lower = 1 - fields(high, 1).reshape(-1, 16, 16).float()
    return (steps[..., None] * (numbers - 4 * is_lower)).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, scales, codes = blocks.split((2, 2, 12, 128), dim=1)
    numbers = fields(codes.unflatten(1, (-1, 32)), 4).reshape(-1, 8, 32)
    return _with_steps(scale, least, scales, numbers)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, scales, high, codes = blocks.split((2, 2, 12, 32, 128), dim=1)
    numbers = fields(codes.unflatten(1, (-1, 32)), 4).reshape(-1, 8, 32)
    return _with_steps(scale, least, scales, numbers | fields(high, 1) << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high, scales, scale = blocks.split((128, 64, 16, 2), dim=1)
    steps = half(scale) * scales.view(torch.int8).float()
    low = fields(low.unflatten(1, (-1, 64)), 4).reshape(-1, 8, 32)
    high = fields(high.unflatten(1, (-1, 32)), 2).reshape(-1, 8, 32)
    numbers = (low | high << 4).reshape(-1, 16, 16).float() - 32
    return (steps[..., None] * numbers).flatten(1)


def _fifth_bits(codes: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """32 numbers of 5 bits: four of each in `(N, 16)` bytes, the fifth of all in `(N, 4)`, lowest first."""
    return fields(codes, 4).flatten(1) | fields_by_byte(high, 1) << 4


def _with_steps(scale: torch.Tensor, least: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Eight groups of 32, each with a step and a least number of 6 bits: of the first four they are whole in 8 bytes, whose
    upper bits are the upper ones of the last four.
    """
    steps, lows, rest = scales.unflatten(1, (3, 4)).unbind(1)
    steps, lows = (
        torch.cat([first & 63, last | first >> 2 & 48], dim=1)
        for first, last in ((steps, rest & 15), (lows, rest >> 4))
    )
    wide = (half(scale) * steps.float())[..., None] * numbers.float()
    return (wide - (half(least) * lows.float())[..., None]).flatten(1)


READERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0, "Q5_1": _q5_1, "Q5_0": _q5_0, "Q4_1": _q4_1, "Q4_0": _q4_0,
    "Q6_K": _q6_k, "Q5_K": _q5_k, "Q4_K": _q4_k, "Q3_K": _q3_k, "Q2_K": _q2_k,
    **gguf_codebooks.READERS, **gguf_grids.READERS,
}  # fmt: skip
"""What reads `(N, bytes)` blocks as `(N, elements)` numbers, by format."""
