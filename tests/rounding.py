"""How activations are rounded to 4 bits in a run on one rank, and runs over ranks beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from runtime.quant.svdquant import core
from runtime.quant.svdquant.core import SVDQuantCore
from runtime.quant.svdquant.formats import Format, round_activations

SAME_INPUT = 1e-5
"""Of the largest activation of a token: sums in another order differ by a millionth, an earlier flip by far more."""
OTHER_CODE = 1e-3
"""Of the largest activation of a group, of which the steps between codes are at least 0.08."""


class Rows(NamedTuple):
    """Tokens of a Linear before and after they are rounded. Both `(T, K)`."""

    given: torch.Tensor
    rounded: torch.Tensor


class Seen(NamedTuple):
    """Of a Linear's call on a rank: activations, those of them that were on one rank the same but went to another code (flips),
    and the largest distance of a token from the nearest on one rank, of its largest activation.
    """

    activations: int
    flips: int
    farthest: float


class Roundings:
    """What every 4-bit Linear has rounded on one rank, by the order of their first calls. A rank has any of those tokens, in any
    order, and a part of their features: it is compared with the nearest.
    """

    def __init__(self) -> None:
        self._now = local()
        self._rows: dict[int, list[Rows]] = {}
        self.seen: list[Seen] = []

    @property
    def activations(self) -> int:
        """How many were compared."""
        return sum(seen.activations for seen in self.seen)

    @property
    def flips(self) -> int:
        """How many were the same before they were rounded, and another code after it."""
        return sum(seen.flips for seen in self.seen)

    @property
    def farthest(self) -> float:
        """The largest distance of a token from one of one rank."""
        return max(seen.farthest for seen in self.seen)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is rounded here, on one rank."""
        with self._instead(self._keep):
            yield

    @contextmanager
    def compared(self, *, same_codes: bool = False) -> Iterator[None]:
        """Compare what is rounded here, on several ranks; with `same_codes` the codes are those that were kept."""
        self.seen = []
        with self._instead(lambda x, form: self._compare(x, form, same_codes)):
            yield

    @contextmanager
    def _instead(self, rounding: Callable[[torch.Tensor, Format], torch.Tensor]) -> Iterator[None]:
        self._now = local()
        hook = register_module_forward_pre_hook(self._enter)
        try:
            with patch.object(core, "round_activations", rounding):
                yield
        finally:
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, SVDQuantCore):
            order = self._now.__dict__.setdefault("order", {})
            self._now.number, self._now.columns = order.setdefault(module, len(order)), columns_of(module)

    def _keep(self, x: torch.Tensor, form: Format) -> torch.Tensor:
        values, width = round_activations(x, form), len(self._now.columns)
        rows = Rows(*(each[..., :width].flatten(0, -2).clone() for each in (x, values)))
        self._rows.setdefault(self._now.number, []).append(rows)
        return values

    def _compare(self, x: torch.Tensor, form: Format, same_codes: bool) -> torch.Tensor:
        values, columns = round_activations(x, form), self._now.columns
        known = Rows(*(torch.cat(each)[:, columns] for each in zip(*self._rows[self._now.number], strict=True)))
        rows = x[..., : len(columns)].flatten(0, -2)
        distances, nearest = torch.cdist(rows, known.given, p=float("inf")).min(-1)
        distances /= rows.abs().amax(-1).clamp_min(1e-9)
        kept = values.clone()
        kept[..., : len(columns)] = known.rounded[nearest].view(*x.shape[:-1], -1)
        largest = x.unflatten(-1, (-1, form.group)).abs().amax(-1, keepdim=True)
        other = (kept - values).abs().unflatten(-1, (-1, form.group)) > OTHER_CODE * largest
        flips = other.flatten(-2).flatten(0, -2)[distances < SAME_INPUT]
        self.seen.append(Seen(rows.numel(), int(flips.sum()), float(distances.max())))
        return kept if same_codes else values


def columns_of(linear: SVDQuantCore) -> torch.Tensor:
    """The numbers of the input features that a rank has of a Linear."""
    return torch.cat([torch.arange(span.start, span.stop) for span in linear._columns])
