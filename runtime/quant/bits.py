"""Numbers of a few bits in bytes, taken apart."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of 4 bits, by their code."""


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """`(..., n)` bytes -> `(..., 8 / bits, n)`: the lowest bits of all of them, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed[..., None, :] >> shifts[:, None] & (1 << bits) - 1


def fields_by_byte(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """`(..., n)` bytes -> `(..., n * 8 / bits)`: all of the first, lowest first, then those of the next."""
    return fields(packed, bits).transpose(-1, -2).flatten(-2)


def half(pair: torch.Tensor) -> torch.Tensor:
    """`(N, 2)` bytes -> `(N, 1)`, what the 16-bit float in them is."""
    return pair.contiguous().view(torch.float16).float()


def words(packed: torch.Tensor, nbytes: int) -> torch.Tensor:
    """`(..., n)` bytes -> `(..., n / nbytes)` int64 of so many bytes each, lowest first, without a sign."""
    places = 8 * torch.arange(nbytes, device=packed.device)
    return (packed.unflatten(-1, (-1, nbytes)).long() << places).sum(-1)


def looked_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`(T, ...)` and `(...)` of places in it -> `(..., ...)`."""
    return table.index_select(0, places.flatten().int()).view(*places.shape, *table.shape[1:])
