"""Packed tensors of Nunchaku's files <-> plain ones. Everything is in the order in which a warp's 32 lanes read it.

N output and K input features come in tiles of 128 x 64; both are padded to 128. In the names of the dims below `lane` is
a lane's place among those of its row or column, and `pair` two neighbours that it reads as one word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TILE_N, TILE_K, PADDED = 128, 64, 128
FRAGMENT = 16
"""Side of a tile of the low-rank matrices."""


def padded(size: int) -> int:
    """The size that a dim of `size` features has in a file."""
    return -(-size // PADDED) * PADDED


def grown(tensor: torch.Tensor, sizes: Sequence[int], *, fill: float = 0) -> torch.Tensor:
    """The tensor with its dims grown to these sizes by zeros, or by another number."""
    if list(tensor.shape) == list(sizes):
        return tensor
    larger = tensor.new_full(sizes, fill) if fill else tensor.new_zeros(sizes)
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """`(N, K / 2)` bytes -> `(N, K)` uint8 codes from 0 to 15. A lane's words hold rows n, n + 8 and columns k, k + 32."""
    n, k = packed.shape[0], packed.shape[1] * 2
    tiles = packed.view(torch.uint8).reshape(n // TILE_N, k // TILE_K, 8, 8, 4, 2, 2, 4)
    codes = torch.stack([tiles & 15, tiles >> 4], dim=-1)  # tile_n tile_k block lane_n lane_k half_n half_k byte nibble
    return codes.permute(0, 2, 5, 3, 1, 6, 4, 7, 8).reshape(n, k)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """`(N, K)` codes, of which the low four bits count -> `(N, K / 2)` int8."""
    n, k = codes.shape
    tiles = (codes.to(torch.uint8) & 15).reshape(n // TILE_N, 8, 2, 8, k // TILE_K, 2, 4, 4, 2)
    low, high = tiles.permute(0, 4, 1, 3, 6, 2, 5, 7, 8).unbind(-1)
    return (low | high << 4).reshape(n, k // 2).contiguous().view(torch.int8)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """16-bit scales of groups of 64, `(K / 64, N)` in name -> `(N, K / 64)`. A lane reads n, n + 1, n + 8, n + 9."""
    groups, n = packed.shape
    tiles = packed.reshape(n // TILE_N, groups, 8, 4, 2, 2)  # tile_n group block lane half pair
    return tiles.permute(0, 2, 4, 3, 5, 1).reshape(n, groups)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """`(N, K / 64)` -> `(K / 64, N)` in name."""
    n, groups = scales.shape
    return scales.reshape(n // TILE_N, 8, 2, 4, 2, groups).permute(0, 5, 1, 3, 2, 4).reshape(groups, n)


def unpack_micro_scales(packed: torch.Tensor) -> torch.Tensor:
    """8-bit scales of groups of 16, `(K / 16, N)` in name -> `(N, K / 16)`. A word has the four groups of a tile's width;
    a lane reads those of rows n, n + 32, n + 64, n + 96.
    """
    groups, n = packed.shape
    tiles = packed.view(torch.uint8).reshape(
        n // TILE_N, groups // 4, 8, 4, 4, 4
    )  # tile_n tile_k row eight quarter group
    return tiles.permute(0, 4, 3, 2, 1, 5).reshape(n, groups).view(packed.dtype)


def pack_micro_scales(scales: torch.Tensor) -> torch.Tensor:
    """`(N, K / 16)` of an 8-bit dtype -> `(K / 16, N)` in name."""
    n, groups = scales.shape
    rows = scales.contiguous().view(torch.uint8).reshape(n // TILE_N, 4, 4, 8, groups // 4, 4)
    return rows.permute(0, 4, 3, 2, 1, 5).reshape(groups, n).view(scales.dtype)


def unpack_vector(packed: torch.Tensor) -> torch.Tensor:
    """`(N,)` bias, smoothing or scale of a channel -> the same in plain order."""
    return unpack_scales(packed[None]).flatten()


def pack_vector(vector: torch.Tensor) -> torch.Tensor:
    """`(N,)` -> the same in the order of the lanes."""
    return pack_scales(vector[:, None]).flatten()


def unpack_up(packed: torch.Tensor) -> torch.Tensor:
    """`proj_up`: `(N, rank)` -> the same in plain order. A lane reads rows n, n + 8 and columns k, k + 1, k + 8, k + 9."""
    n, rank = packed.shape
    tiles = packed.reshape(
        n // FRAGMENT, rank // FRAGMENT, 8, 4, 2, 2, 2
    )  # tile_n tile_r lane_n lane_k half_n half_k pair
    return tiles.permute(0, 4, 2, 1, 5, 3, 6).reshape(n, rank)


def pack_up(up: torch.Tensor) -> torch.Tensor:
    """`(N, rank)` -> the same in the order of the lanes."""
    n, rank = up.shape
    tiles = up.reshape(n // FRAGMENT, 2, 8, rank // FRAGMENT, 2, 4, 2)
    return tiles.permute(0, 3, 2, 5, 1, 4, 6).reshape(n, rank)


def unpack_down(packed: torch.Tensor) -> torch.Tensor:
    """`proj_down`: `(K, rank)` in name -> `(rank, K)`. The tiles run along K first, and lie as those of `proj_up` do."""
    k, rank = packed.shape
    tiles = packed.reshape(k // FRAGMENT, rank // FRAGMENT, 8, 4, 2, 2, 2)
    return tiles.permute(1, 4, 2, 0, 5, 3, 6).reshape(rank, k)


def pack_down(down: torch.Tensor) -> torch.Tensor:
    """`(rank, K)` -> `(K, rank)` in name."""
    rank, k = down.shape
    tiles = down.reshape(rank // FRAGMENT, 2, 8, k // FRAGMENT, 2, 4, 2)
    return tiles.permute(3, 0, 2, 5, 1, 4, 6).reshape(k, rank)
