"""Blocks of GGUF whose codes are places in a grid of 4 or 8 numbers at once: number for number what the package `gguf` gives.

Format: github.com/ggml-org/ggml, ggml-common.h and ggml-quants.c. The grids, which are long lists, are read from the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from .bits import fields_by_byte, half, looked_up, words

DELTA = 0.125
"""How far the numbers of IQ1 are moved, up or down."""
SEVEN_BITS, THREE_BITS = 7, 3


@cache
def _grid(kind: str, device: torch.device) -> torch.Tensor:
    """`(places, 4 or 8)` float32."""
    from gguf import quants

    tables = getattr(quants, kind)
    tables.init_grid()
    return torch.from_numpy(tables.grid.reshape(tables.grid_shape)).to(device)


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 64), dim=1)
    places, rest = codes.unflatten(1, (8, 8)).split((4, 4), dim=2)
    rest = words(rest, 4)
    steps = half(scale) * ((rest >> 28).flatten(1).float() + 0.5) * 0.25
    return _scaled(steps, looked_up(_grid("IQ2_XXS", blocks.device), places.flatten(1)), _even_signs(rest))


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes, scales = blocks.split((2, 64, 8), dim=1)
    codes = words(codes, 2)
    steps = half(scale) * (fields_by_byte(scales, 4).float() + 0.5) * 0.25
    signs = _with_parity(codes >> 9)
    return _scaled(steps, looked_up(_grid("IQ2_XS", blocks.device), codes & 511), signs)


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    scale, low, signs, high, scales = blocks.split((2, 32, 32, 8, 8), dim=1)
    places = low.int() | fields_by_byte(high, 2).int() << 8
    steps = half(scale) * (fields_by_byte(scales, 4).float() + 0.5) * 0.25
    return _scaled(steps, looked_up(_grid("IQ2_S", blocks.device), places), fields_by_byte(signs, 1))


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    scale, places, rest = blocks.split((2, 64, 32), dim=1)
    rest = words(rest, 4)
    steps = half(scale) * ((rest >> 28).float() + 0.5) * 0.5
    return _scaled(steps, looked_up(_grid("IQ3_XXS", blocks.device), places), _even_signs(rest))


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    scale, low, high, signs, scales = blocks.split((2, 64, 8, 32, 4), dim=1)
    places = low.int() | fields_by_byte(high, 1).int() << 8
    steps = half(scale) * (1 + 2 * fields_by_byte(scales, 4)).float()
    return _scaled(steps, looked_up(_grid("IQ3_S", blocks.device), places), fields_by_byte(signs, 1))


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    scale, low, rest = blocks.split((2, 32, 16), dim=1)
    rest = words(rest, 2)
    places = low.int() | _threes(rest) << 8
    steps = half(scale) * (2 * (rest >> 12 & 7) + 1).float()
    return _moved(steps, looked_up(_grid("IQ1_S", blocks.device), places), rest >> 15)


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    """Its 16-bit scale lies in the upper bits of the four words with the scales of 16 numbers each."""
    low, high, scales = blocks.split((32, 16, 8), dim=1)
    scales, high = words(scales, 2), fields_by_byte(high, 4).int()
    upper = (scales >> 12) << 4 * torch.arange(4, device=blocks.device)
    scale = upper.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    steps = scale * (2 * _threes(scales) + 1).float()
    places = low.int() | (high & 7) << 8
    return _moved(steps, looked_up(_grid("IQ1_M", blocks.device), places), high >> 3)


def _scaled(steps: torch.Tensor, numbers: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """`(N, groups)` steps of the numbers of a block, of which the signs `(N, elements)` are 1 for below 0."""
    wide = steps[..., None] * numbers.reshape(*steps.shape, -1)
    return wide.flatten(1) * (1 - 2 * signs.float())


def _moved(steps: torch.Tensor, numbers: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The numbers of a block, moved up, or `down` where that is 1 (for as many of them as it has places), in steps."""
    moved = numbers.reshape(*down.shape, -1) + (DELTA - 2 * DELTA * down.float())[..., None]
    return (steps[..., None] * moved.reshape(*steps.shape, -1)).flatten(1)


def _even_signs(rest: torch.Tensor) -> torch.Tensor:
    """`(N, n)` words of four times seven bits -> `(N, n * 32)`."""
    shifts = torch.arange(0, 4 * SEVEN_BITS, SEVEN_BITS, device=rest.device)
    return _with_parity((rest[..., None] >> shifts & 127).flatten(1))


def _with_parity(seven: torch.Tensor) -> torch.Tensor:
    """`(N, n)` of seven bits -> `(N, n * 8)`: the eighth makes the number of ones even."""
    bits = seven.to(torch.uint8)[..., None] >> torch.arange(SEVEN_BITS, dtype=torch.uint8, device=seven.device) & 1
    return torch.cat([bits, bits.sum(-1, keepdim=True, dtype=torch.uint8) & 1], dim=-1).flatten(1)


def _threes(packed: torch.Tensor) -> torch.Tensor:
    """`(N, n)` words -> `(N, n * 4)` numbers of three bits, lowest first."""
    shifts = torch.arange(0, 4 * THREE_BITS, THREE_BITS, device=packed.device)
    return (packed[..., None] >> shifts & 7).flatten(1).int()


READERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "IQ3_S": _iq3_s, "IQ3_XXS": _iq3_xxs, "IQ2_S": _iq2_s, "IQ2_XS": _iq2_xs, "IQ2_XXS": _iq2_xxs, "IQ1_M": _iq1_m,
    "IQ1_S": _iq1_s,
}  # fmt: skip
"""What reads `(N, bytes)` blocks as `(N, elements)` numbers, by format."""
