"""One Linear in 4 bits, made for the inputs that it has (SVDQuant, Li et al. 2024, arXiv:2411.05007)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..quant.svdquant.formats import SHIFT, Format, round_activations
from ..quant.svdquant.making import Rounded, largest_of, low_rank, round_nearest, round_weight, tensor_scale_of

SMOOTHINGS = ((0, 0), (0.25, 0), (0.5, 0), (0.75, 0), (1, 0), (0.25, 0.25), (0.5, 0.25), (0.5, 0.5))
"""Exponents of the largest input and the largest weight of a feature (Xiao et al. 2023, arXiv:2211.10438)."""
LARGEST_SMOOTHING = 100.0
SMALLEST = 1e-4
ROUNDS = 6
"""How often the low rank and what is rounded beside it are fitted to each other."""
TRIED_ROWS, TRIED_TOKENS, AT_LITTLE_COST = 512, 512, 1 << 30
"""So many rows of a weight tell which smoothing is best, and so many inputs how large an error is: more where that takes no
more than so many multiplications.
"""
BLOCK = 1 << 21
"""Numbers of a weight that are worked on at once."""
VALUES = torch.bfloat16
"""In which the values of all codes are exact."""


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
        rounded, rounded_x = self.rounded, _rounded_inputs(x, self.smooth, form)
        output = F.linear(F.linear(x, self.down), self.up, self.bias)
        for rows in _blocks(weight):
            part = Rounded(rounded.values[rows], rounded.scales[rows], rounded.tensor_scale)
            output[:, rows] += F.linear(rounded_x, part.weight)
        return _relative(output, _outputs(x, weight))


def fit_linear(weight: torch.Tensor, x: torch.Tensor, *, form: Format, rank: int) -> Fitted:
    """The best fit of a weight `(N, K)`, as it is stored, to inputs `(T, K)` in float32, K a multiple of the group."""
    left = torch.empty(weight.shape)
    some = _some(x, max(TRIED_TOKENS, AT_LITTLE_COST // weight.numel()))
    every = max(1, len(weight) // TRIED_ROWS)
    options = {"form": form, "rank": rank, "left": left}
    tries = (next(_fits(weight, some, smooth, every=every, **options)) for smooth in _smoothings(weight, x))
    smooth = min(tries, key=_error).smooth  # no more than the best and the latest are held
    return min(_fits(weight, some, smooth, **options), key=_error)


def nearest_error(weight: torch.Tensor, x: torch.Tensor, *, form: Format) -> float:
    """The error of plain rounding to the nearest, of weight and inputs in the same groups."""
    rounded_x, tensor_scale = round_activations(x, form), tensor_scale_of(largest_of(weight).float(), form)
    output = torch.empty(len(x), len(weight))
    for rows in _blocks(weight):
        output[:, rows] = F.linear(
            rounded_x, round_nearest(weight[rows].float(), form, tensor_scale=tensor_scale).weight
        )
    return _relative(output, _outputs(x, weight))


def _fits(
    weight: torch.Tensor,
    x: torch.Tensor,
    smooth: torch.Tensor,
    *,
    form: Format,
    rank: int,
    left: torch.Tensor,
    every: int = 1,
) -> Iterator[Fitted]:
    """Fits of the low rank and the rest to each other, for one smoothing; all exact but for their errors' size. `left`, of
    the size of the weight, is worked in. Where only one of `every` so many rows is rounded, the first fit alone is one.
    """
    rows, rounded_x = weight[::every], _rounded_inputs(x, smooth, form)
    expected, down = _outputs(x, rows), None
    torch.mul(weight, smooth, out=left)
    for _ in range(ROUNDS):
        up, down = (half.bfloat16().float() for half in low_rank(left, rank, near=down))
        up, unsmoothed = up[::every], (down / smooth).bfloat16().float()
        output = F.linear(F.linear(x, unsmoothed), up)
        rounded = _round_beside(rows, smooth, up, down, form=form, left=left[::every], x=rounded_x, output=output)
        bias = (expected - output).mean(0)
        yield Fitted(rounded, smooth, up, unsmoothed, bias, _relative(output + bias, expected))


def _round_beside(
    weight: torch.Tensor, smooth: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *,
    form: Format, left: torch.Tensor, x: torch.Tensor, output: torch.Tensor,
) -> Rounded:  # fmt: skip
    """What the low rank leaves of the smoothed weight, rounded; its product with `x` is added to `output`, and what it leaves
    of the smoothed weight goes to `left`. Some rows at a time.
    """
    blocks = _blocks(weight)
    values = torch.empty(weight.shape, dtype=VALUES)
    scales = torch.empty(len(weight), weight.shape[1] // form.group)
    tensor_scale = torch.ones(())
    if form.is_float:
        largest = [largest_of(weight[rows] * smooth - up[rows] @ down) for rows in blocks]
        tensor_scale = tensor_scale_of(torch.stack(largest).max(), form)
    for rows in blocks:
        smoothed = weight[rows] * smooth
        part = round_weight(smoothed - up[rows] @ down, form, tensor_scale=tensor_scale)
        values[rows], scales[rows] = part.values, part.scales
        output[:, rows] += F.linear(x, part.weight)
        torch.sub(smoothed, part.weight, out=left[rows])
    return Rounded(values, scales, tensor_scale)


def _smoothings(weight: torch.Tensor, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """What inputs are divided by and weights multiplied with, `(K,)`, of a size around 1."""
    inputs, weights = (
        torch.maximum(tensor.amax(0), -tensor.amin(0)).float().clamp(min=SMALLEST) for tensor in (x, weight)
    )
    for of_inputs, of_weights in SMOOTHINGS:
        smooth = inputs**of_inputs / weights**of_weights
        smooth = smooth / smooth.log().mean().exp()
        yield smooth.clamp(1 / LARGEST_SMOOTHING, LARGEST_SMOOTHING).bfloat16().float()


def _rounded_inputs(x: torch.Tensor, smooth: torch.Tensor, form: Format) -> torch.Tensor:
    return round_activations((x + SHIFT if form.unsigned else x) / smooth, form)


def _outputs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x W^T`, of a weight as it is stored."""
    return torch.cat([F.linear(x, weight[rows].float()) for rows in _blocks(weight)], dim=1)


def _blocks(weight: torch.Tensor) -> list[slice]:
    """Rows of a weight that are worked on together."""
    count = max(1, BLOCK // weight.shape[1])
    return [slice(start, start + count) for start in range(0, len(weight), count)]


def _some(rows: torch.Tensor, count: int) -> torch.Tensor:
    """At most about so many rows, evenly spread."""
    return rows[:: max(1, len(rows) // count)].contiguous()


def _relative(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _error(fitted: Fitted) -> float:
    return fitted.error
