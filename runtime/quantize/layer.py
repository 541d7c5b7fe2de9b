"""One Linear in 4 bits, made for the inputs that it has (SVDQuant, Li et al. 2024, arXiv:2411.05007)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..quant.svdquant.formats import SHIFT, Format, round_activations
from ..quant.svdquant.making import Rounded, low_rank, round_nearest, round_weight

SMOOTHINGS = ((0, 0), (0.25, 0), (0.5, 0), (0.75, 0), (1, 0), (0.25, 0.25), (0.5, 0.25), (0.5, 0.5))
"""Exponents of the largest input and the largest weight of a feature (Xiao et al. 2023, arXiv:2211.10438)."""
LARGEST_SMOOTHING = 100.0
SMALLEST = 1e-4
ROUNDS = 6
"""How often the low rank and what is rounded beside it are fitted to each other."""


@dataclass(frozen=True)
class Fitted:
    """`y = Q(x / smooth) W^T + (x down^T) up^T + bias` for a Linear without its own bias, and the error of that on inputs
    it was made for, as a share of the output.
    """

    rounded: Rounded
    smooth: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    bias: torch.Tensor
    error: float

    def error_on(self, x: torch.Tensor, weight: torch.Tensor, *, form: Format) -> float:
        """The error on other inputs of the Linear."""
        rounded_x = round_activations((x + SHIFT if form.unsigned else x) / self.smooth, form)
        output = F.linear(rounded_x, self.rounded.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)
        return _relative(output, F.linear(x, weight))


def fit_linear(weight: torch.Tensor, x: torch.Tensor, *, form: Format, rank: int) -> Fitted:
    """The best fit of a weight `(N, K)` to inputs `(T, K)`, both float32, K a multiple of the group."""
    tries = (next(_fits(weight, x, smooth, form=form, rank=rank)) for smooth in _smoothings(weight, x))
    smooth = min(tries, key=_error).smooth  # no more than the best and the latest are held
    return min(_fits(weight, x, smooth, form=form, rank=rank), key=_error)


def nearest_error(weight: torch.Tensor, x: torch.Tensor, *, form: Format) -> float:
    """The error of plain rounding to the nearest, of weight and inputs in the same groups."""
    return _relative(F.linear(round_activations(x, form), round_nearest(weight, form).weight), F.linear(x, weight))


def _fits(weight: torch.Tensor, x: torch.Tensor, smooth: torch.Tensor, *, form: Format, rank: int) -> Iterator[Fitted]:
    """Fits of the low rank and the rest to each other, for one smoothing; all exact but for their errors' size."""
    expected, smoothed = F.linear(x, weight), weight * smooth
    rounded_x = round_activations((x + SHIFT if form.unsigned else x) / smooth, form)
    rest = torch.zeros_like(smoothed)
    for _ in range(ROUNDS):
        up, down = (half.bfloat16().float() for half in low_rank(smoothed - rest, rank))
        rounded = round_weight(smoothed - up @ down, form)
        rest, unsmoothed = rounded.weight, (down / smooth).bfloat16().float()
        output = F.linear(rounded_x, rest) + F.linear(F.linear(x, unsmoothed), up)
        bias = (expected - output).mean(0)
        yield Fitted(rounded, smooth, up, unsmoothed, bias, _relative(output + bias, expected))


def _smoothings(weight: torch.Tensor, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """What inputs are divided by and weights multiplied with, `(K,)`, of a size around 1."""
    inputs, weights = (tensor.abs().amax(0).clamp(min=SMALLEST) for tensor in (x, weight))
    for of_inputs, of_weights in SMOOTHINGS:
        smooth = inputs**of_inputs / weights**of_weights
        smooth = smooth / smooth.log().mean().exp()
        yield smooth.clamp(1 / LARGEST_SMOOTHING, LARGEST_SMOOTHING).bfloat16().float()


def _relative(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _error(fitted: Fitted) -> float:
    return fitted.error
