"""DPM-Solver++ (Lu et al. 2022, arXiv:2211.01095): exponential integrators that predict the picture."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import Renoise, ancestral, slope


def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """DPM-Solver++(2M) (algorithm 2 there), in `time = -log(sigma)`; to 0 by first order."""
    total = len(sigmas) - 1
    times = [-sigma.log() for sigma in sigmas]
    earlier = None
    for step, (time, following) in enumerate(pairwise(times), start=1):
        denoised = denoise(x, sigmas[step - 1])
        progress(step, total, denoised)
        stride, ahead = following - time, denoised
        if earlier is not None and sigmas[step] > 0:
            half = 1 / (2 * ((time - times[step - 2]) / stride))
            ahead = (1 + half) * denoised - half * earlier
        x = (-following).exp() / (-time).exp() * x - (-stride).expm1() * ahead
        earlier = denoised
    return x


def dpmpp_2m_cfg_pp(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """`dpmpp_2m` with CFG++ (Chung et al. 2024, arXiv:2406.08070): the noise is the one the negative prompt sees."""
    total = len(sigmas) - 1
    times = [-sigma.log() for sigma in sigmas]
    earlier = None
    for step, (time, following) in enumerate(pairwise(times), start=1):
        denoised, negative = denoise.both(x, sigmas[step - 1])
        progress(step, total, denoised)
        stride = following - time
        kept = (-stride).exp()
        mixed = denoised - kept * negative
        if earlier is not None and sigmas[step] > 0:
            half = 1 / (2 * ((time - times[step - 2]) / stride))
            mixed = denoised + (-kept * negative - (-stride).expm1() * half * (denoised - earlier))
        x = mixed + kept * x
        earlier = negative
    return x


def dpmpp_2s_ancestral(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise
) -> Tensor:
    """DPM-Solver++(2S) (algorithm 1 there) for flow models, with fresh noise at the end of each step; see `Renoise`.

    The middle of a step is the middle in log-SNR; from sigma 1, where that is infinite, it is 0.9999.
    """
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return x + slope(x, sigma, denoised) * (following - sigma)
        renoise, middle = Renoise.of(sigma, following), sigma.new_tensor(0.9999)
        if sigma != 1:
            start, end = (((1 - level) / level).log() for level in (sigma, renoise.lower))
            middle = ((start + 0.5 * (end - start)).exp() + 1) ** -1
        kept = middle / sigma
        again = denoise(kept * x + (1 - kept) * denoised, middle)
        kept = renoise.lower / sigma
        x = renoise(kept * x + (1 - kept) * again, noise(sigma, following))
    return x


def dpmpp_2s_ancestral_cfg_pp(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise
) -> Tensor:
    """DPM-Solver++(2S) with CFG++ and fresh noise; in ComfyUI it takes flow latents for noise-only ones, and so here.

    The second half starts from what the negative prompt predicts in the middle.
    """
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised, negative = denoise.both(x, sigma)
        progress(step, total, denoised)
        lower, up = ancestral(sigma, following)
        if lower == 0:
            x = denoised + slope(x, sigma, negative) * lower
        else:
            time, end = -sigma.log(), -lower.log()
            stride = end - time
            middle = (-(time + 0.5 * stride)).exp()
            ahead = middle / (-time).exp() * (x + (denoised - negative)) - (-stride * 0.5).expm1() * denoised
            again, negative = denoise.both(ahead, middle)
            x = (-end).exp() / (-time).exp() * (x + (denoised - negative)) - (-stride).expm1() * again
        if following > 0:
            x = x + noise(sigma, following) * up
    return x
