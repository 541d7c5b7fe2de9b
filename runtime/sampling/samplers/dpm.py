"""DPM-Solver (Lu et al. 2022, arXiv:2206.00927), in `time = -log(sigma)`, predicting noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import Renoise, slope

Slopes = Callable[[Tensor, Tensor], Tensor]
"""`(x, time) -> dx / dsigma`: one model call."""

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 0.05, 0.0078
FIRST_STRIDE, ACCEPTED_FROM = 0.05, 0.81


def dpm_2(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Midpoint steps in log(sigma), to 0 by an Euler step (k-diffusion's mean of DPM-Solver-2 and Karras et al. 2022)."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        x = _midpoint(denoise, x, sigma, following, denoised)
    return x


def dpm_2_ancestral(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """`dpm_2` steps that go below the next sigma and come back with fresh noise, for flow models; see `Renoise`."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        renoise = Renoise.of(sigma, following)
        x = _midpoint(denoise, x, sigma, renoise.lower, denoised)
        if renoise.lower > 0:
            x = renoise(x, noise(sigma, following))
    return x


def _midpoint(denoise: Denoise, x: Tensor, sigma: Tensor, target: Tensor, denoised: Tensor) -> Tensor:
    """From `sigma` to `target` along the slope halfway there."""
    current = slope(x, sigma, denoised)
    if target > 0:
        middle = sigma.log().lerp(target.log(), 0.5).exp()
        ahead = x + current * (middle - sigma)
        current = slope(ahead, middle, denoise(ahead, middle))
    return x + current * (target - sigma)


def dpm_fast(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """DPM-Solver-fast: as many model calls as there are steps, in thirds of steps of order 3; reports those.

    Only the ends of the schedule are used, and it stops at the last sigma above 0.
    """
    calls, times = len(sigmas) - 1, _ends(sigmas)
    count = calls // 3 + 1
    orders = [3] * (count - 2) + [2, 1] if calls % 3 == 0 else [3] * (count - 1) + [calls % 3]
    for step, (time, following) in enumerate(pairwise(torch.linspace(*times, count + 1)), start=1):
        denoised = denoise(x, _sigma(time))
        progress(step, count, denoised)
        x = _solvers(denoise, x, time, following, denoised)[orders[step - 1]]()
    return x


def dpm_adaptive(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """DPM-Solver-23: the step's length follows from the difference between the results of order 2 and 3.

    Only the ends of the schedule are used, and it stops at the last sigma above 0. Its steps are as many as it takes: what
    is reported is the part of the way that the step leads to, in steps of the schedule. With what is not a number it would
    never arrive, so that it ends there.
    """
    time, end = _ends(sigmas)
    start, total, done, smooth = time, len(sigmas) - 1, 1, x
    way = 1 if end > start else -1  # -1: sigmas that rise, from a picture to its noise
    stride = way * FIRST_STRIDE
    while way * time < way * end - 1e-5:
        following = way * torch.minimum(way * end, way * (time + stride))
        denoised = denoise(x, _sigma(time))
        done = max(done, int(total * (following - start) / (end - start)))
        progress(done, total, denoised)
        solvers = _solvers(denoise, x, time, following, denoised, first=1 / 3)
        low, high = solvers[2](), solvers[3]()
        allowed = torch.clamp(RELATIVE_TOLERANCE * torch.maximum(low.abs(), smooth.abs()), min=ABSOLUTE_TOLERANCE)
        error = float(torch.linalg.norm((low - high) / allowed) / x.numel() ** 0.5)
        if math.isnan(error):
            return high
        factor = 1 + math.atan((1 / (error + 1e-8)) ** (1 / 3) - 1)
        stride *= factor
        if factor >= ACCEPTED_FROM:
            smooth, x, time = low, high, following
    return x


def _ends(sigmas: Tensor) -> tuple[Tensor, Tensor]:
    """Times of the first sigma and of the last above 0."""
    return -sigmas[0].log(), -(sigmas[-1] if sigmas[-1] > 0 else sigmas[-2]).log()


def _sigma(time: Tensor) -> Tensor:
    return time.neg().exp()


def _solvers(
    denoise: Denoise, x: Tensor, time: Tensor, following: Tensor, denoised: Tensor, *, first: float = 0.5
) -> dict[int, Callable[[], Tensor]]:
    """The three solvers of a step by their order, given its first model call. Order 2 looks at `first` of the way."""
    stride, slopes = following - time, {0.0: slope(x, _sigma(time), denoised)}
    whole, now = _sigma(following) * stride.expm1(), slopes[0.0]

    def ahead(part: float, correction: Tensor | float = 0.0) -> Tensor:
        """The slope at a part of the step; of what was asked for once there is no second call."""
        if part not in slopes:
            middle = time + part * stride
            probe = x - _sigma(middle) * (part * stride).expm1() * now - correction
            slopes[part] = slope(probe, _sigma(middle), denoise(probe, _sigma(middle)))
        return slopes[part]

    def order_2() -> Tensor:
        return x - whole * now - whole / (2 * first) * (ahead(first) - now)

    def order_3() -> Tensor:
        part = 2 / 3 * stride
        change = ahead(1 / 3) - now
        bend = _sigma(time + part) * 2 * (part.expm1() / part - 1) * change
        change = ahead(2 / 3, bend) - now
        return x - whole * now - _sigma(following) / (2 / 3) * (stride.expm1() / stride - 1) * change

    return {1: lambda: x - whole * now, 2: order_2, 3: order_3}
