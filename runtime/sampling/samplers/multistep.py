"""Steps along a combination of the slopes of this step and of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import slope

Advance = Callable[[Tensor, Tensor, int, Sequence[Tensor]], Tensor]
"""`(x, sigmas, index, slopes) -> x` after the step from `sigmas[index]`; the latest of two or more slopes is first."""

ADAMS_BASHFORTH = {2: ((3, -1), 2), 3: ((23, -16, 5), 12), 4: ((55, -59, 37, -9), 24)}
"""Weights and what they are divided by, by order."""


def lms(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """Linear multistep of order 4: the polynomial through the last slopes, integrated (k-diffusion)."""
    return _multistep(denoise, x, sigmas, progress=progress, advance=_along_polynomial, order=4)


def ipndm(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """iPNDM (Zhang & Chen 2022, arXiv:2204.13902): Adams-Bashforth of order 4, as if sigmas lay at even distance."""

    def advance(x: Tensor, sigmas: Tensor, index: int, slopes: Sequence[Tensor]) -> Tensor:
        weights, divisor = ADAMS_BASHFORTH[len(slopes)]
        return x + (sigmas[index + 1] - sigmas[index]) * _weighted(weights, slopes) / divisor

    return _multistep(denoise, x, sigmas, progress=progress, advance=advance, order=4)


def ipndm_v(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """iPNDM with Adams-Bashforth weights for the sigmas there are."""

    def advance(x: Tensor, sigmas: Tensor, index: int, slopes: Sequence[Tensor]) -> Tensor:
        weights = _variable_adams_bashforth(sigmas, index, len(slopes))
        return x + (sigmas[index + 1] - sigmas[index]) * _weighted(weights, slopes)

    return _multistep(denoise, x, sigmas, progress=progress, advance=advance, order=4)


def deis(denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, noise: StepNoise) -> Tensor:
    """DEIS of order 3, tAB (Zhang & Chen 2022, arXiv:2204.13902): slopes are a polynomial in the time of a VP model."""

    def advance(x: Tensor, sigmas: Tensor, index: int, slopes: Sequence[Tensor]) -> Tensor:
        return _weighted(_deis_weights(sigmas, index, len(slopes)), slopes, start=x)

    return _multistep(denoise, x, sigmas, progress=progress, advance=advance, order=3)


def _multistep(
    denoise: Denoise, x: Tensor, sigmas: Tensor, *, progress: ReportStep, advance: Advance, order: int
) -> Tensor:
    """The loop of them all; the first step has order 1, and so has the one to 0, which ends on the picture."""
    total, slopes = len(sigmas) - 1, []
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        slopes = [slope(x, sigma, denoised), *slopes[: order - 1]]
        first = len(slopes) == 1
        x = x + (following - sigma) * slopes[0] if first else advance(x, sigmas, step - 1, slopes)
    return x


def _weighted(weights: Sequence[Tensor | float], tensors: Sequence[Tensor], *, start: Tensor | int = 0) -> Tensor:
    return sum((weight * tensor for weight, tensor in zip(weights, tensors, strict=True)), start)


def _along_polynomial(x: Tensor, sigmas: Tensor, index: int, slopes: Sequence[Tensor]) -> Tensor:
    """The integral of the polynomial through the slopes. In numpy's float32 as in ComfyUI: large weights nearly cancel."""
    from scipy.integrate import quad  # not before it is needed: it takes memory of every rank

    nodes = sigmas[index - len(slopes) + 1 : index + 1].flip(0).numpy()
    ends = sigmas[index : index + 2].numpy()
    weights = [quad(_lagrange, *ends, args=(nodes, number), epsrel=1e-4)[0] for number in range(len(slopes))]
    return x + _weighted(weights, slopes)


def _lagrange(place: Tensor | float, nodes: Sequence, number: int) -> Tensor | float:
    """The polynomial that is 1 at `nodes[number]` and 0 at the others."""
    product = 1.0
    for other, node in enumerate(nodes):
        if other != number:
            product = product * ((place - node) / (nodes[number] - node))
    return product


def _variable_adams_bashforth(sigmas: Tensor, index: int, order: int) -> list[Tensor]:
    """Weights from divided differences of the slopes, up to third.

    `second` and `third` are those of the implementation by the authors of diff-sampler that ComfyUI took over: its factor
    of the second difference lacks a bracket, and so is not Adams-Bashforth's. The picture must be the same.
    """
    h, h1, h2, h3 = [sigmas[index - back + 1] - sigmas[index - back] for back in range(order)] + [None] * (4 - order)
    latest, before = (2 + h / h1) / 2, -(h / h1) / 2
    if order == 2:
        return [latest, before]
    second = (1 - h / (3 * (h + h1)) * (h * (h + h1)) / (h1 * (h1 + h2))) / 2
    latest, before, oldest = latest + second, before - (1 + h1 / h2) * second, second * h1 / h2
    if order == 3:
        return [latest, before, oldest]
    third = (1 - h / (3 * (h + h1))) / 2 + (1 - h / (2 * (h + h1))) * h / (6 * (h + h1 + h2))
    third = third * (h * (h + h1) * (h + h1 + h2)) / (h1 * (h1 + h2) * (h1 + h2 + h3))
    further = h1 * (h1 + h2) / (h2 * (h2 + h3))
    before = before - (1 + h1 / h2 + further) * third
    oldest = oldest + (h1 / h2 + further * (1 + h2 / h3)) * third
    return [latest + third, before, oldest, -third * further * h1 / h2]


DEIS_POINTS = 10000
"""Of the sum that stands for the integral; the picture depends on it."""


def _deis_weights(sigmas: Tensor, index: int, order: int) -> list[Tensor]:
    """Integrals over the step of the Lagrange polynomials in VP time, with the weight that DEIS gives to noise.

    The VP model is the one of Karras et al. 2022 (table 1) that reaches from sigma 0.002 to 80.
    """
    lowest, highest = float((torch.tensor(0.002) ** 2 + 1).log()), math.log(80**2 + 1)
    slope_of_beta = 2 * (lowest / 1e-3 - highest) / (1e-3 - 1)
    first_beta = highest - 0.5 * slope_of_beta
    recent = sigmas[index - order + 1 : index + 2].flip(0)
    times = ((first_beta**2 + 2 * slope_of_beta * (recent**2 + 1).log()).sqrt() - first_beta) / slope_of_beta
    following, nodes = times[0], times[1:]
    places = torch.linspace(nodes[0], following, DEIS_POINTS)
    rise = (slope_of_beta + first_beta) - first_beta
    kept = torch.exp(-0.5 * places**2 * rise - places * first_beta)
    unit = 1 / kept * kept
    change = unit * rise * -0.5 * (2 * places) - unit * first_beta
    density = -0.5 * change / torch.sqrt(kept * (1 - kept))
    width = (following - nodes[0]) / DEIS_POINTS
    return [torch.sum(density * _lagrange(places, nodes, number)) * width for number in range(order)]
