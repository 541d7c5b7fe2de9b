"""DPM-Solver++ for the reverse SDE (Lu et al. 2022, arXiv:2211.01095, appendix), in half log-SNR, with Brownian noise."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import Level, ancestral


def dpmpp_sde(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Two model calls a step: the prediction halfway there, reached with noise of its own, leads all the way."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        start, middle, target = _levels(sigma, following)
        halfway = _noisy_step(x, denoised, start, middle, noise)
        x = _noisy_step(x, denoise(halfway, middle.sigma), start, target, noise)
    return x


def two_strides(sigma: Tensor, following: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What `dpmpp_sde` draws noise for in a step: the way to its middle, then all of it."""
    start, middle, target = _levels(sigma, following)
    return (start.sigma, middle.sigma), (start.sigma, target.sigma)


def _levels(sigma: Tensor, following: Tensor) -> tuple[Level, Level, Level]:
    """Start, middle and end of a step, in half log-SNR."""
    start, target = Level.of(sigma), Level.of(following)
    return start, Level.at(start.half_log_snr + 0.5 * (target.half_log_snr - start.half_log_snr)), target


def _noisy_step(x: Tensor, denoised: Tensor, start: Level, target: Level, noise: StepNoise) -> Tensor:
    """First order down to the ancestral level below `target`, and up again by noise."""
    lower, up = ancestral(start.ratio, target.ratio)
    stride = -lower.log() - start.half_log_snr
    x = target.alpha / start.alpha * (-stride).exp() * x - target.alpha * (-stride).expm1() * denoised
    return x + target.alpha * noise(start.sigma, target.sigma) * up


def dpmpp_2m_sde(
    denoise: Denoise,
    x: Tensor,
    sigmas: Tensor,
    *,
    progress: ReportStep,
    noise: StepNoise,
    solver: Literal["midpoint", "heun"] = "midpoint",
) -> Tensor:
    """SDE-DPM-Solver++(2M): second order by the change since the step before, weighed in one of two ways."""
    total, earlier, stride_before = len(sigmas) - 1, None, None
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        stride, alpha, x = _noisy_euler(x, denoised, sigma, following)
        if earlier is not None:
            change = (denoised - earlier).mul_(stride / stride_before)
            gone = -(-2 * stride).expm1()
            weight = 0.5 * gone if solver == "midpoint" else gone / (-2 * stride) + 1
            x += change.mul_(alpha * weight)
        x += noise(sigma, following).mul_(_fresh(following, stride))
        earlier, stride_before = denoised, stride
    return x


def dpmpp_3m_sde(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """SDE-DPM-Solver++(3M): third order by the changes over the two steps before."""
    total, predictions, strides = len(sigmas) - 1, [], []
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        stride, alpha, x = _noisy_euler(x, denoised, sigma, following)
        predictions = [denoised, *predictions[:2]]
        ratios = [before / stride for before in strides]
        changes = [
            (later - before).div_(ratio) for (later, before), ratio in zip(pairwise(predictions), ratios, strict=True)
        ]
        weight = (-2 * stride).expm1() / (2 * stride) + 1
        if len(changes) == 1:
            x += changes[0].mul_(alpha * weight)
        if len(changes) == 2:
            bend = (changes[0] - changes[1]).div_(ratios[0] + ratios[1])
            x += (bend * ratios[0]).add_(changes[0]).mul_(alpha * weight)
            x -= bend.mul_(alpha * (weight / (2 * stride) - 0.5))
        x += noise(sigma, following).mul_(_fresh(following, stride))
        strides = [stride, *strides[:1]]
    return x


def _noisy_euler(x: Tensor, denoised: Tensor, sigma: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A first-order step: its length, the share of the picture after it, and the latent without the fresh noise."""
    start, target = Level.of(sigma), Level.of(following)
    stride, alpha = target.half_log_snr - start.half_log_snr, target.alpha
    x = (x * (following / sigma * (-stride).exp())).sub_(denoised * (alpha * (-2 * stride).expm1()))
    return stride, alpha, x


def _fresh(following: Tensor, stride: Tensor) -> Tensor:
    """How much noise of a step is fresh."""
    return following * (-(-2 * stride).expm1()).sqrt()
