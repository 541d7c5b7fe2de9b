"""Steps that look ahead: the slope is a mean of those here and at the sigmas that follow."""

from __future__ import annotations

from itertools import pairwise, takewhile

from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import slope


def heun(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Heun's method, to 0 by an Euler step (Karras et al. 2022, arXiv:2206.00364, algorithm 2 without churn)."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        stride, current = following - sigma, slope(x, sigma, denoised)
        if following > 0:
            ahead = x + current * stride
            current = (current + slope(ahead, following, denoise(ahead, following))) / 2
        x = x + current * stride
    return x


def heunpp2(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Heun++: looks one or two sigmas ahead, but not at the last, and weighs each slope there by its sigma.

    (Carzit's sd-webui-samplers-scheduler; there is no paper.)
    """
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        slopes, ahead, level = [slope(x, sigma, denoised)], x, sigma
        seen = list(takewhile(lambda later: later != sigmas[-1], sigmas[step : step + 2]))
        for later in seen:
            ahead, level = ahead + slopes[-1] * (later - level), later
            slopes.append(slope(ahead, later, denoise(ahead, later)))
        weights = [later / (len(slopes) * sigmas[0]) for later in seen]
        mean = sum(
            (weight * value for weight, value in zip(weights, slopes[1:], strict=True)), (1 - sum(weights)) * slopes[0]
        )
        x = x + mean * (following - sigma)
    return x
