"""The formulas of UniPC (Zhao et al. 2023, arXiv:2302.04867) with B(h) = h, predicting data.

UniPC is written for variance-preserving latents, `y = x / sqrt(1 + sigma ** 2)`, so that is what moves through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Level:
    """A noise level: `y = alpha * picture + std * noise`, and `half_log_snr = log(alpha / std)`. Float32, no dims."""

    sigma: torch.Tensor
    alpha: torch.Tensor
    std: torch.Tensor
    half_log_snr: torch.Tensor

    @classmethod
    def of(cls, sigma: torch.Tensor) -> Level:
        """Every figure comes from log(alpha), as in the paper's code: its float32 rounding is up to 2 % of std at 0.001."""
        log_alpha = 0.5 * torch.log(1 / (sigma * sigma + 1))
        variance = 1.0 - torch.exp(2.0 * log_alpha)
        return cls(sigma, torch.exp(log_alpha), torch.sqrt(variance), log_alpha - 0.5 * torch.log(variance))


def predict_data(denoise: Callable, y: torch.Tensor, level: Level) -> torch.Tensor:
    """The picture that `y` holds, by way of its noise (which carries the rounding of `std`, as in ComfyUI)."""
    x = y * (level.sigma**2 + 1.0) ** 0.5
    noise = (x - denoise(x, level.sigma)) / level.sigma
    return (y - level.std * noise) / level.alpha


@dataclass(frozen=True)
class Update:
    """One step of UniPC: all that predictor and corrector share.

    `base` is the first-order result and `scale * slopes` what the earlier predictions add to it; `latest` is the
    prediction at the level one comes from. `weights` has one more entry than `slopes`: that of the new prediction.
    """

    base: torch.Tensor
    scale: torch.Tensor
    latest: torch.Tensor
    slopes: tuple[torch.Tensor, ...]
    predictor_weights: torch.Tensor
    corrector_weights: torch.Tensor

    @classmethod
    def of(cls, y: torch.Tensor, predictions: Sequence[torch.Tensor], levels: Sequence[Level]) -> Update:
        """From `y` at `levels[-2]` to `levels[-1]`; `predictions`, oldest first, are those at all levels but the last.

        Their count is the order.
        """
        *earlier, current, target = levels
        *older, latest = predictions
        stride = target.half_log_snr - current.half_log_snr
        ratios = [(level.half_log_snr - current.half_log_snr) / stride for level in reversed(earlier)]
        slopes = tuple((prediction - latest) / ratio for prediction, ratio in zip(reversed(older), ratios, strict=True))
        base = target.std / current.std * y - target.alpha * torch.expm1(-stride) * latest
        return cls(base, -target.alpha * -stride, latest, slopes, *_weights(ratios, -stride))

    def predicted(self) -> torch.Tensor:
        """`y` at the new level, before the model has seen it."""
        return self.base + self.scale * _weighted(self.predictor_weights, self.slopes) if self.slopes else self.base

    def corrected(self, prediction: torch.Tensor) -> torch.Tensor:
        """`y` at the new level, given the prediction made there from `predicted()`."""
        return self.base + self.scale * _weighted(self.corrector_weights, (*self.slopes, prediction - self.latest))


def _weights(ratios: Sequence[torch.Tensor], h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of predictor and corrector: both solve `R @ weights = b`; of one unknown they are 1/2 by convention."""
    order = len(ratios) + 1
    nodes = torch.tensor([*ratios, 1.0])
    powers = torch.stack([nodes**power for power in range(order)])
    phi, factorial, right = torch.expm1(h) / h - 1, 1, []
    for index in range(1, order + 1):
        right.append(phi * factorial / h)
        factorial *= index + 1
        phi = phi / h - 1 / factorial
    right = torch.tensor(right)
    half = torch.tensor([0.5])
    predictor = torch.linalg.solve(powers[:-1, :-1], right[:-1]) if order > 2 else half
    corrector = torch.linalg.solve(powers, right) if order > 1 else half
    return predictor, corrector


def _weighted(weights: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True))
