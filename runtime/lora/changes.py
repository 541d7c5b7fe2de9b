"""What a file does to one tensor of a model: products of small matrices, full differences, rescaled rows.

What is low rank need not touch the weight at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from ..parallel.lengths import length_of
from ..parallel.shares import WHOLE, Cut


@dataclass(frozen=True)
class Place:
    """Where a change is made: which part of the tensor a rank has, the shape of the whole, and how numbers are added up
    over the ranks that hold other parts along a dim."""

    cut: Cut
    full: torch.Size
    sum_over: Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Change:
    """Base: something that adds to a weight. `rows` are those of its output that go to this tensor, in their order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is changed; of products `(out, in)`, what is in the kernel of a convolution taken together."""
        raise NotImplementedError

    @property
    def adds_nothing(self) -> bool:
        """Whether it leaves every weight as it is, its alpha being 0."""
        return False

    def added(self, device: torch.device) -> torch.Tensor:
        """The sum that is added at strength 1, in float32."""
        raise NotImplementedError

    def pair(self) -> LowRank | None:
        """The same as a pair, where that is the smaller form."""
        return None

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor | Change))

    def to(self, device: torch.device) -> Change:
        """The same with its tensors on a device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{n: part.to(device) for n, part in parts.items() if isinstance(part, torch.Tensor | Change)}
        )

    def rows(self, cut: Cut) -> Change:
        """The change of a tensor that is these rows of the one the file means."""
        return self if cut == WHOLE else Rows(self, cut)

    def apply(self, weight: torch.Tensor, strength: float, place: Place) -> torch.Tensor:
        """This rank's part of the changed weight, from its part before; both float32."""
        return weight + strength * place.cut.take(self.added(weight.device).reshape(place.full))


@dataclass(frozen=True, eq=False)
class LowRank(Change):
    """`scale * up @ down`: `(rank, in)` and `(out, rank)`, of a convolution with its kernel behind (arXiv:2106.09685)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.down.ndim < 2 or self.up.ndim < 2 or self.down.shape[0] != self.up[0].numel():
            raise ValueError(f"{tuple(self.up.shape)} and {tuple(self.down.shape)} are no low-rank pair")

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.up), self.down[0].numel()

    @property
    def adds_nothing(self) -> bool:
        return self.scale == 0.0

    def added(self, device: torch.device) -> torch.Tensor:
        return (_matrix(self.up, device) @ _matrix(self.down, device)).mul_(self.scale)

    def pair(self) -> LowRank:
        return replace(self, down=self.down.flatten(1), up=self.up.flatten(1))

    def rows(self, cut: Cut) -> LowRank:
        return replace(self, up=cut.take(self.up))


@dataclass(frozen=True, eq=False)
class Hadamard(Change):
    """LoHa: the product, number by number, of two low-rank matrices (arXiv:2108.06098)."""

    first: LowRank
    second: LowRank

    def __post_init__(self) -> None:
        if self.first.shape != self.second.shape:
            raise ValueError(f"{self.first.shape} and {self.second.shape} cannot be multiplied number by number")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.shape

    @property
    def adds_nothing(self) -> bool:
        return self.first.adds_nothing

    def added(self, device: torch.device) -> torch.Tensor:
        return self.first.added(device).mul_(self.second.added(device))

    def pair(self) -> LowRank | None:
        """Of the product of the ranks: row by row and column by column, each number of one times each of the other."""
        first, second = self.first.pair(), self.second.pair()
        if not _is_smaller(len(first.down) * len(second.down), len(first.up), first.down.shape[1]):
            return None
        up = torch.einsum("oi,oj->oij", first.up.float(), second.up.float()).flatten(1)
        down = torch.einsum("in,jn->ijn", first.down.float(), second.down.float()).flatten(0, 1)
        return LowRank(down, up, first.scale * second.scale)


@dataclass(frozen=True, eq=False)
class Kronecker(Change):
    """LoKr: `scale * first (x) second`, where each is a matrix or a low-rank product (arXiv:2309.14859)."""

    first: torch.Tensor | LowRank
    second: torch.Tensor | LowRank
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        (first_out, first_in), (second_out, second_in) = (
            each.shape if isinstance(each, LowRank) else (len(each), each[0].numel())
            for each in (self.first, self.second)
        )
        return first_out * second_out, first_in * second_in

    @property
    def adds_nothing(self) -> bool:
        return self.scale == 0.0

    def added(self, device: torch.device) -> torch.Tensor:
        return torch.kron(_matrix(self.first, device), _matrix(self.second, device)).mul_(self.scale)

    def pair(self) -> LowRank | None:
        """Of the product of the ranks, since (a b) (x) (c d) = (a (x) c) (b (x) d)."""
        (first_up, first_down), (second_up, second_down) = _factors(self.first), _factors(self.second)
        rank = len(first_down) * len(second_down)
        out, into = len(first_up) * len(second_up), first_down.shape[1] * second_down.shape[1]
        if not _is_smaller(rank, out, into):
            return None
        return LowRank(torch.kron(first_down, second_down), torch.kron(first_up, second_up), self.scale)


@dataclass(frozen=True, eq=False)
class Difference(Change):
    """What is added, as it is."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def added(self, device: torch.device) -> torch.Tensor:
        return self.tensor.to(device, torch.float32)


@dataclass(frozen=True, eq=False)
class Rows(Change):
    """Some rows of another change."""

    inner: Change
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        return length_of(self.cut.spans), *self.inner.shape[1:]

    @property
    def adds_nothing(self) -> bool:
        return self.inner.adds_nothing

    def added(self, device: torch.device) -> torch.Tensor:
        return self.cut.take(self.inner.added(device))

    def pair(self) -> LowRank | None:
        pair = self.inner.pair()
        return pair and pair.rows(self.cut)


@dataclass(frozen=True, eq=False)
class Value(Change):
    """A tensor that takes the place of the model's, whatever the strength."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, cut: Cut) -> Value:
        return Value(cut.take(self.tensor))

    def apply(self, weight: torch.Tensor, strength: float, place: Place) -> torch.Tensor:
        return place.cut.take(self.tensor.float().reshape(place.full)).to(weight.device)


@dataclass(frozen=True, eq=False)
class Decomposed(Change):
    """DoRA: the changed weight, each row (or column) brought to a trained length (arXiv:2402.09353).

    `magnitude` has a number for each row, or `(1, in)` one for each column. As in ComfyUI the rows are measured before
    the change, unless the magnitudes are PEFT's (`of_sum`), and the columns after it.
    """

    inner: Change
    magnitude: torch.Tensor
    of_sum: bool = False

    def __post_init__(self) -> None:
        rows, *columns = self.inner.shape
        lengths = self.magnitude.numel()
        if lengths != (rows if self.by_row else math.prod(columns)):
            raise ValueError(
                f"{lengths} trained lengths are neither those of {rows} rows nor of {math.prod(columns)} columns"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def by_row(self) -> bool:
        """Whether rows are brought to a length, not columns."""
        return self.magnitude.ndim > 0 and len(self.magnitude) > 1

    def rows(self, cut: Cut) -> Decomposed:
        """With the magnitudes of those rows. Raises `ValueError` when they are those of columns, which have more rows."""
        if cut == WHOLE:
            return self
        inner = self.inner.rows(cut)
        if not self.by_row and inner.shape[0] == self.shape[0]:
            return replace(self, inner=inner)
        if not self.by_row:
            raise ValueError("its magnitudes are those of the columns of several layers in one")
        return replace(self, inner=inner, magnitude=cut.take(self.magnitude))

    def apply(self, weight: torch.Tensor, strength: float, place: Place) -> torch.Tensor:
        """Part of the way, as the strength says, to the weight of the trained lengths."""
        changed = self.inner.apply(weight, 1.0, place)
        measured = weight if self.by_row and not self.of_sum else changed
        kept, summed = (0, 1) if self.by_row else (1, 0)
        squares = measured.flatten(1).square().sum(summed, keepdim=True)
        lengths = place.sum_over(squares, summed).sqrt() + torch.finfo(weight.dtype).eps
        magnitude = self.magnitude.float().flatten().unsqueeze(summed).to(weight.device)
        if place.cut.dim == kept:
            magnitude = place.cut.take(magnitude)
        resized = changed.flatten(1).mul_(magnitude / lengths).reshape(weight.shape)
        return resized.sub_(weight).mul_(strength).add_(weight)


def _matrix(factor: torch.Tensor | LowRank, device: torch.device) -> torch.Tensor:
    return factor.added(device) if isinstance(factor, LowRank) else factor.to(device, torch.float32).flatten(1)


def _factors(factor: torch.Tensor | LowRank) -> tuple[torch.Tensor, torch.Tensor]:
    """Up and down of a factor; a full matrix is the product of itself with the identity on its smaller side."""
    if isinstance(factor, LowRank):
        return factor.up.flatten(1).float() * factor.scale, factor.down.flatten(1).float()
    matrix = factor.flatten(1).float()
    out, into = matrix.shape
    return (matrix, torch.eye(into)) if into <= out else (torch.eye(out), matrix)


def _is_smaller(rank: int, out: int, into: int) -> bool:
    return rank * (out + into) < out * into
