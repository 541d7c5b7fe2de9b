"""The tensors of one 4-bit Linear: their shapes, their plain form, and the part of each that belongs to a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import Refused
from ...parallel.lengths import length_of
from . import packing
from .formats import Format
from .packing import PADDED, TILE_K, TILE_N, grown, padded

Spans = tuple[slice, ...]
"""Features along one dim of a weight, in order."""
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How one of the tensors lies: the way to its plain form and back, the dims of that along the output (`n`) and the
    input features (`k`), how many input features share a number, and what fills the padding.
    """

    unpack: Change
    pack: Change
    n: int | None = None
    k: int | None = None
    group: int = 1
    fill: float = 0


@dataclass(frozen=True)
class Packing:
    """The tensors of a Linear with `n` output and `k` input features in one format."""

    n: int
    k: int
    rank: int
    form: Format

    def shape(self, leaf: str) -> tuple[int, ...]:
        """The shape that a file gives for a tensor."""
        n, k = padded(self.n), padded(self.k)
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (n, k // 2),
            "wscales": (k // self.form.group, n),
            "proj_up": (n, self.rank),
            "proj_down": (k, self.rank),
            "smooth_factor": (k,),
            "smooth_factor_orig": (k,),
            "bias": (n,),
            "wcscales": (n,),
            "wtscale": (1,),
        }
        return shapes[leaf]

    def layout(self, leaf: str) -> Layout:
        """How a tensor lies."""
        micro = self.form.is_float
        by_row, by_column = ({"n": 0}, {"k": 0})
        scales = (packing.unpack_micro_scales, packing.pack_micro_scales) if micro else _SCALES
        return {
            "qweight": Layout(packing.unpack_codes, packing.pack_codes, n=0, k=1),
            "wscales": Layout(*scales, n=0, k=1, group=self.form.group),
            "proj_up": Layout(packing.unpack_up, packing.pack_up, **by_row),
            "proj_down": Layout(packing.unpack_down, packing.pack_down, k=1),
            "smooth_factor": Layout(*_VECTOR, **by_column, fill=1),  # kernels divide by it
            "smooth_factor_orig": Layout(*_VECTOR, **by_column, fill=1),
            "bias": Layout(*_VECTOR, **by_row),
            "wcscales": Layout(*_VECTOR, **by_row),
            "wtscale": Layout(torch.Tensor.contiguous, torch.Tensor.contiguous),
        }[leaf]

    def plain(self, leaf: str, packed: torch.Tensor) -> torch.Tensor:
        """The plain form of a tensor, without padding."""
        layout = self.layout(leaf)
        tensor = layout.unpack(packed)
        for dim, size in ((layout.n, self.n), (layout.k, -(-self.k // layout.group))):
            tensor = tensor if dim is None else tensor.narrow(dim, 0, size)
        return tensor

    def packed(self, leaf: str, plain: torch.Tensor) -> torch.Tensor:
        """A tensor as a file has it, from its plain form."""
        layout, sizes = self.layout(leaf), list(plain.shape)
        for dim, size in ((layout.n, padded(self.n)), (layout.k, padded(self.k) // layout.group)):
            if dim is not None:
                sizes[dim] = size
        return layout.pack(grown(plain, sizes, fill=layout.fill)).reshape(self.shape(leaf))


_SCALES = (packing.unpack_scales, packing.pack_scales)
_VECTOR = (packing.unpack_vector, packing.pack_vector)


@dataclass(frozen=True)
class PackedCut:
    """The part of a packed tensor for some features of its Linear, packed as that of a smaller Linear.

    Whole tiles are moved as they are. What does not end with a tile is unpacked, cut and packed again: the same numbers.
    Raises `Refused` when the input features are no whole groups.
    """

    leaf: str
    full: Packing
    rows: Spans
    columns: Spans

    def __post_init__(self) -> None:
        group = self.full.form.group
        for span in self.columns:
            if span.start % group or (span.stop % group and span.stop != self.full.k):
                raise Refused(
                    f"a rank would hold inputs {span.start} to {span.stop} of {self.full.k}, and they are no whole groups of "
                    f"{group}, which are rounded together: use another tensor degree, or none"
                )

    @property
    def local(self) -> Packing:
        """The smaller Linear."""
        return Packing(length_of(self.rows), length_of(self.columns), self.full.rank, self.full.form)

    def take(self, full: Any) -> torch.Tensor:
        """The part of a tensor, or of a slice of a safetensors file."""
        tensor = full[:]
        if _are_tiles(self.rows, self.full.n, TILE_N) and _are_tiles(self.columns, self.full.k, TILE_K):
            return self._moved(tensor)
        layout = self.full.layout(self.leaf)
        plain = _cut(self.full.plain(self.leaf, tensor), layout.n, self.rows)
        return self.local.packed(self.leaf, _cut(plain, layout.k, self.columns, unit=layout.group))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tiles lie one row of tiles after the other, whatever shape the tensor is said to have."""
        layout = self.full.layout(self.leaf)
        n_tiles = 1 if layout.n is None else padded(self.full.n) // TILE_N
        k_tiles = 1 if layout.k is None else padded(self.full.k) // TILE_K
        grid = tensor.reshape(n_tiles, k_tiles, -1)
        if layout.n is not None and self.rows != every(self.full.n):
            grid = _cut(grid, 0, self.rows, unit=TILE_N)
        if layout.k is not None and self.columns != every(self.full.k):
            grid = _cut(grid, 1, self.columns, unit=TILE_K)
        return grid.reshape(self.local.shape(self.leaf)).contiguous()


@dataclass(frozen=True)
class PlainCut:
    """Those output features of a packed vector, in plain order."""

    leaf: str
    full: Packing
    rows: Spans

    def take(self, full: Any) -> torch.Tensor:
        """The part of a tensor, or of a slice of a safetensors file."""
        return _cut(self.full.plain(self.leaf, full[:]), 0, self.rows)


def _cut(tensor: torch.Tensor, dim: int | None, spans: Spans, *, unit: int = 1) -> torch.Tensor:
    """These features along a dim that has one place for `unit` of them."""
    if dim is None:
        return tensor
    return torch.cat(
        [tensor.narrow(dim, span.start // unit, -(-length_of((span,)) // unit)) for span in spans], dim=dim
    )


def _are_tiles(spans: Spans, size: int, tile: int) -> bool:
    """Whether spans are whole tiles, and fill what a Linear of their size is padded to."""
    if spans == every(size):
        return True
    return all(span.start % tile == 0 and span.stop % tile == 0 for span in spans) and length_of(spans) % PADDED == 0


def every(size: int) -> Spans:
    """All features of a dim."""
    return (slice(0, size),)
