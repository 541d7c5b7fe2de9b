"""UniPC (Zhao et al. 2023, arXiv:2302.04867), predicting data.

UniPC is written for variance-preserving latents, `y = x / sqrt(1 + sigma ** 2)`, so that is what moves through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep

Scale = Callable[[Tensor], Tensor]
"""B(h) of the paper, of minus the step's length in half log-SNR."""


def uni_pc(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise, scale: Scale
) -> Tensor:
    """UniPC of order 3, which falls to 1 towards the end.

    With a single step the order is 0: as in ComfyUI, what comes back is the starting noise, rescaled. Raises `ValueError`
    for sigmas that repeat, between which it has no slope.
    """
    total = len(sigmas) - 1
    if (sigmas[1:] == sigmas[:-1]).any():
        raise ValueError(f"uni_pc cannot take {total} steps on this schedule, which repeats a sigma: use fewer steps")
    levels = [Level.of(sigma) for sigma in sigmas]
    y = x / torch.sqrt(1.0 + sigmas[0] ** 2)
    predictions = [predict_data(denoise, y, levels[0])]
    progress(1, total, predictions[-1])
    for step in range(1, total + 1):
        order = min(step, 3, total - 1, total + 1 - step)
        if not order:
            break
        update = Update.of(y, predictions[-order:], levels[step - order : step + 1], scale=scale)
        y = update.predicted()
        if step < total:
            prediction = predict_data(denoise, y, levels[step])
            progress(step + 1, total, prediction)
            y = update.corrected(prediction)
            predictions = [*predictions[-2:], prediction]
    return y / levels[-1].alpha


def bh1(h: Tensor) -> Tensor:
    """B1 of the paper."""
    return h


def bh2(h: Tensor) -> Tensor:
    """B2 of the paper."""
    return torch.expm1(h)


@dataclass(frozen=True)
class Level:
    """A noise level: `y = alpha * picture + std * noise`, and `half_log_snr = log(alpha / std)`. Float32, no dims."""

    sigma: Tensor
    alpha: Tensor
    std: Tensor
    half_log_snr: Tensor

    @classmethod
    def of(cls, sigma: Tensor) -> Level:
        """Every figure comes from log(alpha), as in the paper's code: its float32 rounding is up to 2 % of std at 0.001."""
        log_alpha = 0.5 * torch.log(1 / (sigma * sigma + 1))
        variance = 1.0 - torch.exp(2.0 * log_alpha)
        return cls(sigma, torch.exp(log_alpha), torch.sqrt(variance), log_alpha - 0.5 * torch.log(variance))


def predict_data(denoise: Callable, y: Tensor, level: Level) -> Tensor:
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

    base: Tensor
    scale: Tensor
    latest: Tensor
    slopes: tuple[Tensor, ...]
    predictor_weights: Tensor
    corrector_weights: Tensor

    @classmethod
    def of(cls, y: Tensor, predictions: Sequence[Tensor], levels: Sequence[Level], *, scale: Scale) -> Update:
        """From `y` at `levels[-2]` to `levels[-1]`; `predictions`, oldest first, are those at all levels but the last.

        Their count is the order.
        """
        *earlier, current, target = levels
        *older, latest = predictions
        stride = target.half_log_snr - current.half_log_snr
        ratios = [(level.half_log_snr - current.half_log_snr) / stride for level in reversed(earlier)]
        slopes = tuple((prediction - latest) / ratio for prediction, ratio in zip(reversed(older), ratios, strict=True))
        base = target.std / current.std * y - target.alpha * torch.expm1(-stride) * latest
        return cls(base, -target.alpha * scale(-stride), latest, slopes, *_weights(ratios, -stride, scale(-stride)))

    def predicted(self) -> Tensor:
        """`y` at the new level, before the model has seen it."""
        return self.base + self.scale * _weighted(self.predictor_weights, self.slopes) if self.slopes else self.base

    def corrected(self, prediction: Tensor) -> Tensor:
        """`y` at the new level, given the prediction made there from `predicted()`."""
        return self.base + self.scale * _weighted(self.corrector_weights, (*self.slopes, prediction - self.latest))


def _weights(ratios: Sequence[Tensor], h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of predictor and corrector: both solve `R @ weights = b`; of one unknown they are 1/2 by convention."""
    order = len(ratios) + 1
    nodes = torch.tensor([*ratios, 1.0])
    powers = torch.stack([nodes**power for power in range(order)])
    phi, factorial, right = torch.expm1(h) / h - 1, 1, []
    for index in range(1, order + 1):
        right.append(phi * factorial / scale)
        factorial *= index + 1
        phi = phi / h - 1 / factorial
    right = torch.tensor(right)
    half = torch.tensor([0.5])
    predictor = torch.linalg.solve(powers[:-1, :-1], right[:-1]) if order > 2 else half
    corrector = torch.linalg.solve(powers, right) if order > 1 else half
    return predictor, corrector


def _weighted(weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True))
