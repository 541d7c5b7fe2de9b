"""Which part of a full tensor a rank of a group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..own_memory import joined
from .lengths import even_lengths, grained_lengths, span

__all__ = ["WHOLE", "Cut", "even_lengths", "grained_lengths", "span"]


@dataclass(frozen=True)
class Cut:
    """The part of a full tensor that a rank holds: `spans` along `dim`, one for each block of what is fused there."""

    dim: int = 0
    spans: tuple[slice, ...] = ()

    @classmethod
    def of_blocks(cls, dim: int, size: int, *, blocks: Sequence[int], rank: int, degree: int, grain: int = 1) -> Cut:
        """A rank's even share of each block of `size` features; `blocks` are their relative sizes.

        A block that is a number of grains (heads, of which none is cut in two) is dealt grain by grain. Raises `ValueError` when the size is not that of such blocks.
        """
        unit, rest = divmod(size, sum(blocks))
        if rest:
            raise ValueError(f"{size} features are not blocks of {tuple(blocks)}")
        spans, start = [], 0
        for block in blocks:
            part = span(grained_lengths(block * unit, degree, grain), rank)
            spans.append(slice(start + part.start, start + part.stop))
            start += block * unit
        return cls(dim, tuple(spans))

    def take(self, full: Any) -> torch.Tensor:
        """A copy of the part of a tensor, or of a slice of a safetensors file, of which no more is read than that."""
        if not self.spans:
            return full
        parts = [full[(slice(None),) * self.dim + (part,)] for part in self.spans]
        if isinstance(full, torch.Tensor):
            return torch.cat(parts, dim=self.dim)
        is_copy = len(parts) == 1 and not isinstance(full, RowsOf)
        return parts[0] if is_copy else joined(parts, dim=self.dim)


WHOLE = Cut()


class RowsOf:
    """Some rows of a tensor, or of a slice of a safetensors file, in an order of their own; it is sliced as those are."""

    def __init__(self, full: Any, spans: Sequence[slice]) -> None:
        self._full, self._spans = full, spans

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """The part at `place`, of which no more is read than that."""
        rows, *others = place
        start, parts = 0, []
        for held in self._spans:
            length = held.stop - held.start
            first, last = (
                max(rows.start or 0, start),
                min(start + length if rows.stop is None else rows.stop, start + length),
            )
            if first < last:
                parts.append(self._full[(slice(held.start + first - start, held.start + last - start), *others)])
            start += length
        return parts[0] if len(parts) == 1 else joined(parts, dim=0)
