"""One model call a step, and no memory of earlier ones but the last slope."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import Level, Renoise, ancestral, slope


def euler(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Euler steps down the probability flow (Karras et al. 2022, arXiv:2206.00364, algorithm 2 without churn)."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        x = x + slope(x, sigma, denoised) * (following - sigma)
    return x


def euler_ancestral(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Euler steps that go below the next sigma and come back to it with fresh noise, for flow models; see `Renoise`."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        renoise = Renoise.of(sigma, following)
        kept = renoise.lower / sigma
        x = renoise(kept * x + (1 - kept) * denoised, noise(sigma, following))
    return x


def euler_cfg_pp(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise, eta: float
) -> Tensor:
    """CFG++ (Chung et al. 2024, arXiv:2406.08070): the guided picture, with the noise that the negative prompt sees.

    With `eta` above 0 a part of that noise is fresh, as in DDIM (Song et al. 2020, arXiv:2010.02502).
    """
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised, negative = denoise.both(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        start, target = Level.of(sigma), Level.of(following)
        seen = slope(x, sigma, start.alpha * negative)
        down, up = ancestral(sigma / start.alpha, following / target.alpha, eta=eta)
        x = target.alpha * denoised + target.alpha * down * seen
        if eta:
            x = x + target.alpha * noise(sigma, following) * up
    return x


def gradient_estimation(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise
) -> Tensor:
    """Euler steps along a slope corrected by its last change (Permenter & Yuan 2024, arXiv:2306.04848, with gamma 2)."""
    total, earlier = len(sigmas) - 1, None
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        current, stride = slope(x, sigma, denoised), following - sigma
        x = x + current * stride
        if earlier is not None:
            x = x + (current - earlier) * stride
        earlier = current
    return x


def gradient_estimation_cfg_pp(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise
) -> Tensor:
    """`gradient_estimation` with CFG++: slopes are those of the negative prompt, from the guided picture."""
    total, earlier = len(sigmas) - 1, None
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised, negative = denoise.both(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        current = slope(x, sigma, negative)
        x = denoised + current * following
        if earlier is not None:
            x = x + (current - earlier) * (following - sigma)
        earlier = current
    return x


def ddpm(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Ancestral steps of DDPM (Ho et al. 2020, arXiv:2006.11239, algorithm 2), on `x / sqrt(1 + sigma ** 2)`."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        kept, kept_after = 1 / (sigma * sigma + 1), 1 / (following * following + 1)
        share = kept / kept_after
        y = x / (1 + sigma**2).sqrt() - (1 - share) * slope(x, sigma, denoised) / (1 - kept).sqrt()
        x = (1 / share).sqrt() * y
        if following > 0:
            x = x + ((1 - share) * (1 - kept_after) / (1 - kept)).sqrt() * noise(sigma, following)
            x = x * (1 + following**2).sqrt()
    return x


def lcm(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Latent consistency (Luo et al. 2023, arXiv:2310.04378): each step goes to the picture and noises it anew."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        x = denoise(x, sigma)
        progress(step, total, x)
        if following > 0:
            x = following * noise(sigma, following) + (1 - following) * x
    return x
