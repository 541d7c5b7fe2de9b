"""Where a number lies in Nunchaku's packed tensors, for kernels that read them as they are: `packing`, as index arithmetic.

Sizes are those of the tensor, padded; a place counts elements of it, and of the codes 32-bit words of eight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_word(n: tl.tensor, word: tl.tensor, k_size: tl.constexpr) -> tl.tensor:
    """Of row `n` the word that has the columns `8 * word` to `8 * word + 7`."""
    tile = (n // 128) * (k_size // 64) + word // 8
    lane = (n % 8) * 4 + word % 4
    return ((tile * 8 + n % 128 // 16) * 32 + lane) * 4 + n % 16 // 8 * 2 + word % 8 // 4


@triton.jit
def lane_place(n: tl.tensor) -> tl.tensor:
    """Of 128 numbers in the order in which lanes read 16 bits: the place of number `n`."""
    return n // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2


@triton.jit
def scale_place(n: tl.tensor, group: tl.tensor, groups: tl.constexpr) -> tl.tensor:
    """The 16-bit scale of a row and a group of 64; of a vector, with one group, the number."""
    return (n // 128 * groups + group) * 128 + lane_place(n % 128)


@triton.jit
def micro_scale_place(n: tl.tensor, group: tl.tensor, groups: tl.constexpr) -> tl.tensor:
    """The 8-bit scale of a row and a group of 16."""
    row = n % 128
    lanes = row % 8 * 16 + row % 32 // 8 * 4 + row // 32
    return ((n // 128 * (groups // 4) + group // 4) * 128 + lanes) * 4 + group % 4


@triton.jit
def fragment_place(tile: tl.tensor, row: tl.tensor, column: tl.tensor) -> tl.tensor:
    """In a low-rank matrix, of tiles of 16 x 16, the place of a row and a column of a tile."""
    lane = row % 8 * 4 + column % 8 // 2
    return ((tile * 32 + lane) * 2 + row // 8) * 4 + column // 8 * 2 + column % 2


@triton.jit
def down_place(rank: tl.tensor, k: tl.tensor, ranks: tl.constexpr) -> tl.tensor:
    """`proj_down` at a row of the rank and an input feature: the tiles run along the features first."""
    return fragment_place(k // 16 * (ranks // 16) + rank // 16, rank % 16, k % 16)


@triton.jit
def up_place(n: tl.tensor, rank: tl.tensor, ranks: tl.constexpr) -> tl.tensor:
    """`proj_up` at an output feature and a column of the rank."""
    return fragment_place(n // 16 * (ranks // 16) + rank // 16, n % 16, rank % 16)
