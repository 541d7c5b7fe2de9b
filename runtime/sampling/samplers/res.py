"""RES: refined exponential steps with one earlier prediction (Zhang et al. 2023, arXiv:2308.02157)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import ancestral, slope


def res_multistep(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise, eta: float
) -> Tensor:
    """Second order in `time = -log(sigma)`; with `eta` above 0 it goes below the next sigma, and comes back by noise."""
    total, earlier, lower_before = len(sigmas) - 1, None, None
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        lower, up = ancestral(sigma, following, eta=eta)
        if lower == 0 or earlier is None:
            x = x + slope(x, sigma, denoised) * (lower - sigma)
        else:
            x = _second_order(x, denoised, earlier, sigma, lower, before=sigmas[step - 2], reached=lower_before)
        if eta and following > 0:
            x = x + noise(sigma, following) * up
        earlier, lower_before = denoised, lower
    return x


def res_multistep_cfg_pp(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise, eta: float
) -> Tensor:
    """`res_multistep` with CFG++ (Chung et al. 2024, arXiv:2406.08070): it follows the negative prediction."""
    total, earlier, lower_before = len(sigmas) - 1, None, None
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised, negative = denoise.both(x, sigma)
        progress(step, total, denoised)
        lower, up = ancestral(sigma, following, eta=eta)
        if lower == 0 or earlier is None:
            x = denoised + slope(x, sigma, negative) * lower
        else:
            x = x + (denoised - negative)
            x = _second_order(x, negative, earlier, sigma, lower, before=sigmas[step - 2], reached=lower_before)
        if eta and following > 0:
            x = x + noise(sigma, following) * up
        earlier, lower_before = negative, lower
    return x


def _second_order(
    x: Tensor, denoised: Tensor, earlier: Tensor, sigma: Tensor, lower: Tensor, *, before: Tensor, reached: Tensor
) -> Tensor:
    """One step to `lower`; `earlier` was predicted at `before`, in a step that went down to `reached`."""
    stride = -lower.log() - -sigma.log()
    place = (-before.log() - -reached.log()) / stride
    first = (-stride).expm1() / -stride
    second = (first - 1.0) / -stride
    own, old = (weight.nan_to_num(nan=0.0) for weight in (first - second / place, second / place))
    return (-stride).exp() * x + stride * (own * denoised + old * earlier)
