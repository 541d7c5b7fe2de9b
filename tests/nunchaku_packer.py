"""Tensors as Nunchaku's files have them, packed by address: each number goes where the published layout puts it.

The decoder in `runtime.quant` moves dims; the two share no code.
"""

from __future__ import annotations

import torch

SCALE_LANES = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
"""The rows of a block of 16 in the order in which four lanes read their 16-bit scales."""


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """`(N, K)` codes from 0 to 15 -> `(N, K / 2)` int8. A 32-bit word has eight neighbours of a row; a lane has four words."""
    n, k = places(codes)
    tile = (n // 128) * (codes.shape[1] // 64) + k // 64
    lane = (n % 8) * 4 + k % 32 // 8
    word = ((tile * 8 + n % 128 // 16) * 32 + lane) * 4 + n % 16 // 8 * 2 + k % 64 // 32
    nibbles = torch.zeros(codes.numel(), dtype=torch.uint8)
    nibbles[word * 8 + k % 8] = codes.to(torch.uint8)
    low, high = nibbles.view(-1, 2).unbind(1)
    return (low + 16 * high).view(torch.int8).reshape(len(codes), -1)


def packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """`(N, K / 64)` -> `(K / 64, N)` in name: tiles of 128 rows, one group after the other within."""
    n, group = places(scales)
    order = torch.tensor(SCALE_LANES).argsort()
    place = (n // 128 * scales.shape[1] + group) * 128 + n % 128 // 16 * 16 + order[n % 16]
    return put(scales, place).reshape(scales.shape[1], len(scales))


def packed_micro_scales(scales: torch.Tensor) -> torch.Tensor:
    """`(N, K / 16)` of an 8-bit dtype -> `(K / 16, N)` in name: words of four groups, for rows 32 apart."""
    n, group = places(scales)
    lane = n % 8 * 4 + n % 32 // 8
    place = ((n // 128 * (scales.shape[1] // 4) + group // 4) * 32 + lane) * 16 + n % 128 // 32 * 4 + group % 4
    return put(scales.view(torch.uint8), place).reshape(scales.shape[1], len(scales)).view(scales.dtype)


def packed_vector(vector: torch.Tensor) -> torch.Tensor:
    """`(N,)` as the scales of one group."""
    return packed_scales(vector[:, None]).flatten()


def packed_up(up: torch.Tensor) -> torch.Tensor:
    """`(N, rank)`: tiles of 16 x 16, in the order of their rows."""
    row, column = places(up)
    return put(up, fragment(row // 16 * (up.shape[1] // 16) + column // 16, row, column)).reshape(up.shape)


def packed_down(down: torch.Tensor) -> torch.Tensor:
    """`(rank, K)` -> `(K, rank)` in name: the tiles run along the features first."""
    row, column = places(down)
    return put(down, fragment(column // 16 * (len(down) // 16) + row // 16, row, column)).reshape(down.shape[::-1])


def fragment(tile: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Lanes hold two neighbours of rows n, n + 8 at k, k + 8."""
    lane = row % 8 * 4 + column % 8 // 2
    return (((tile * 32 + lane) * 2 + row % 16 // 8) * 2 + column % 16 // 8) * 2 + column % 2


def packed_modulation(codes: torch.Tensor) -> torch.Tensor:
    """`(N, K)` codes of weights for 16 bits -> `(N / 4, K / 2)` int32: 16-bit words of four, rows in fours, 64 columns of each."""
    n, k = places(codes)
    word = ((n // 4 * (codes.shape[1] // 64) + k // 64) * 4 + n % 4) * 16 + k % 64 // 32 * 8 + k % 8
    nibbles = torch.zeros(codes.numel(), dtype=torch.uint8)
    nibbles[word * 4 + k % 32 // 8] = codes.to(torch.uint8)
    low, high = nibbles.view(-1, 2).unbind(1)
    return (low + 16 * high).view(torch.int32).reshape(len(codes) // 4, -1)


def places(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column of each number."""
    return torch.arange(len(matrix))[:, None], torch.arange(matrix.shape[1])[None]


def put(matrix: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The numbers at their places."""
    memory = torch.empty(matrix.numel(), dtype=matrix.dtype)
    memory[place.flatten()] = matrix.flatten()
    return memory


PACKED = {
    "qweight": packed_codes, "wscales": packed_scales, "proj_up": packed_up, "proj_down": packed_down,
    "smooth_factor": packed_vector, "smooth_factor_orig": packed_vector, "bias": packed_vector, "wcscales": packed_vector,
    "wtscale": torch.clone,
}  # fmt: skip


def packed_linear(plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a Linear of whole tiles as a file has them, from their plain forms."""
    micro = plain["wscales"].dtype == torch.float8_e4m3fn
    pack = PACKED | ({"wscales": packed_micro_scales} if micro else {})
    return {leaf: pack[leaf](tensor) for leaf, tensor in plain.items()}
