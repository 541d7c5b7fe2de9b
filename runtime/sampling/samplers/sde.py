"""Solvers of the reverse SDE with independent noise in each step."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import Level

INTEGRATION_POINTS = 200


def er_sde(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """VP ER-SDE-Solver-3 (Cui et al. 2023, arXiv:2309.06169, algorithm 3), in `ratio = sigma / alpha`."""
    total, earlier, change_before = len(sigmas) - 1, None, None
    levels = [Level.of(sigma) for sigma in sigmas]
    ratios = [level.ratio for level in levels]
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        start, end = ratios[step - 1], ratios[step]
        alpha = following / end
        kept = _noise_scale(end) / _noise_scale(start)
        x = alpha / (sigma / start) * kept * x + alpha * (1 - kept) * denoised
        if earlier is not None:
            linear, quadratic = _er_sde_weights(start, end)
            change = (denoised - earlier) / (start - ratios[step - 2])
            x = x + alpha * linear * change
            if change_before is not None:
                x = x + alpha * quadratic * ((change - change_before) / ((start - ratios[step - 3]) / 2))
            change_before = change
        x = x + alpha * noise(sigma, following) * (end**2 - start**2 * kept**2).sqrt().nan_to_num(nan=0.0)
        earlier = denoised
    return x


def _noise_scale(ratio: Tensor) -> Tensor:
    """The paper's choice of how noise fades (its equation 27)."""
    return ratio * ((ratio**0.3).exp() + 10.0)


def _er_sde_weights(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the first and second change of the prediction; integrals by sums."""
    stride = end - start
    width = -stride / INTEGRATION_POINTS
    places = end + torch.arange(INTEGRATION_POINTS, dtype=torch.float32) * width
    scaled = _noise_scale(places)
    linear = stride + torch.sum(1 / scaled) * width * _noise_scale(end)
    quadratic = stride**2 / 2 + torch.sum((places - start) / scaled) * width * _noise_scale(end)
    return linear, quadratic


class _Step:
    """A step of SEEDS (Gonzalez et al. 2023, arXiv:2305.14267): exponential Runge-Kutta in half log-SNR.

    A stage lies at a fraction of the step. Its noise is that of the stage before, faded, and what is fresh since.
    """

    def __init__(self, x: Tensor, sigma: Tensor, following: Tensor, *, eta: float, noise: StepNoise) -> None:
        self._x, self._eta, self._noise = x, eta, noise
        self._start, self._end = Level.of(sigma), Level.of(following)
        self._stride = self._end.half_log_snr - self._start.half_log_snr
        self._drawn, self._fraction, self._from = 0.0, 0.0, sigma

    def level(self, fraction: float) -> Level:
        """The noise level of a stage."""
        if fraction == 1:
            return self._end
        return Level.at(torch.lerp(self._start.half_log_snr, self._end.half_log_snr, fraction))

    def phi(self, order: int, fraction: float = 1.0) -> Tensor:
        """`h * phi_order(h)` of exponential integrators, for the length of a stage."""
        h = -fraction * (self._stride * (self._eta + 1))
        return h.expm1() if order == 1 else (h.expm1() - h) / h

    def stage(self, level: Level, fraction: float, gained: Tensor) -> Tensor:
        """The latent of a stage. `gained` are the predictions times their weights, which are negative."""
        faded = (-fraction * self._stride * self._eta).exp()
        x = level.sigma / self._start.sigma * faded * self._x - level.alpha * gained
        if not self._eta:
            return x
        segment = (self._fraction - fraction) * self._stride * self._eta
        fresh = (-(2 * segment).expm1()).sqrt() * self._noise(self._from, level.sigma)
        self._drawn = self._drawn * segment.exp() + fresh
        self._fraction, self._from = fraction, level.sigma
        return x + self._drawn * level.sigma


def seeds_2(
    denoise: Denoise,
    x: Tensor,
    sigmas: Tensor,
    *,
    progress: ReportStep,
    noise: StepNoise,
    eta: float = 1.0,
    fraction: float = 0.5,
    solver: Literal["phi_1", "phi_2"] = "phi_1",
) -> Tensor:
    """SEEDS-2, with a stage at a fraction of the step. With solver `phi_2` and fraction 1 it is the exponential Heun method."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        this = _Step(x, sigma, following, eta=eta, noise=noise)
        middle = Level.at(this.level(fraction).half_log_snr)
        ahead = denoise(this.stage(middle, fraction, this.phi(1, fraction) * denoised), middle.sigma)
        if solver == "phi_1":
            gained = this.phi(1) * torch.lerp(denoised, ahead, 1 / (2 * fraction))
        else:
            second = this.phi(2) / fraction
            gained = (this.phi(1) - second) * denoised + second * ahead
        x = this.stage(this.level(1), 1, gained)
    return x


def seeds_3(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """SEEDS-3, with stages at one and two thirds of the step."""
    total, third, two_thirds = len(sigmas) - 1, 1 / 3, 2 / 3
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        this = _Step(x, sigma, following, eta=1.0, noise=noise)
        level = this.level(third)
        second = denoise(this.stage(level, third, this.phi(1, third) * denoised), level.sigma)
        level, weight = this.level(two_thirds), two_thirds / third * this.phi(2, two_thirds)
        gained = (this.phi(1, two_thirds) - weight) * denoised + weight * second
        last = denoise(this.stage(level, two_thirds, gained), level.sigma)
        weight = this.phi(2) / two_thirds
        x = this.stage(this.level(1), 1, (this.phi(1) - weight) * denoised + weight * last)
    return x
