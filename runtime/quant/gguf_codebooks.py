"""Blocks of GGUF whose codes are places in a short list of numbers, or digits to base 3: number for number what `gguf` gives.

Format: github.com/ggml-org/ggml, ggml-common.h and ggml-quants.c. MXFP4: OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .bits import E2M1, fields, fields_by_byte, half, looked_up

FOUR_BITS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4 stand for: closer together near 0, where more of the weights are."""
HALVES = tuple(2 * number for number in E2M1)
"""The floats of 4 bits, in halves."""
NO_SCALE = (0, 127)
"""Codes of a scale of NVFP4 for 0 and for what is no number, which stands for 0 as well."""
POWERS = (1, 3, 9, 27, 81)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 16), dim=1)
    return half(scale) * looked_up(_table(FOUR_BITS, blocks), fields(codes, 4).flatten(1))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scale, high, low, codes = blocks.split((2, 2, 4, 128), dim=1)
    steps = half(scale) * ((fields_by_byte(low, 4) | fields_by_byte(high, 2) << 4).float() - 32)
    numbers = fields(codes.unflatten(1, (8, 16)), 4).flatten(2)
    return (steps[..., None] * looked_up(_table(FOUR_BITS, blocks), numbers)).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent, codes = blocks.split((1, 16), dim=1)
    exponent = exponent.int()
    scale = torch.where(exponent < 2, 1 << 21 + exponent, exponent - 1 << 23).view(torch.float32)
    return scale * looked_up(_table(HALVES, blocks), fields(codes, 4).flatten(1))


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks.split((4, 32), dim=1)
    steps = looked_up(_table(NVFP4_SCALES, blocks), scales)
    numbers = fields(codes.unflatten(1, (4, 8)), 4).flatten(2)
    return (steps[..., None] * looked_up(_table(HALVES, blocks), numbers)).flatten(1)


def _nvfp4_scale(code: int) -> float:
    """Half of what a float of 4 bits of exponent and 3 of mantissa is, without its sign."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code in NO_SCALE:
        return 0.0
    return mantissa * 2.0**-10 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8)


NVFP4_SCALES = tuple(map(_nvfp4_scale, range(256)))


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Five digits in a byte: it is what comes behind the point, and its product with a power of 3 begins with a digit."""
    *parts, scale = blocks.split((32, 16, 4, 2), dim=1)
    powers = torch.tensor(POWERS, dtype=torch.uint8, device=blocks.device)
    digits = [(part[:, None] * powers[:count, None]).flatten(1) for part, count in zip(parts, (5, 5, 4), strict=True)]
    return half(scale) * ((torch.cat(digits, dim=1).int() * 3 >> 8).float() - 1)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    codes, scale = blocks.split((64, 2), dim=1)
    return half(scale) * (fields(codes.unflatten(1, (2, 32)), 2).flatten(1).float() - 1)


def _table(numbers: Sequence[float], blocks: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=blocks.device)


READERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip
"""What reads `(N, bytes)` blocks as `(N, elements)` numbers, by format."""
