"""SA-Solver: a stochastic Adams predictor and corrector (Xue et al. 2023, arXiv:2309.05019), predicting the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..noise import StepNoise
from .base import Denoise, ReportStep
from .levels import Level

PREDICTOR_ORDER, CORRECTOR_ORDER = 3, 4


def sa_solver(
    denoise: Denoise,
    x: Tensor,
    sigmas: Tensor,
    *,
    progress: ReportStep,
    noise: StepNoise,
    noisy_from: float,
    noisy_to: float,
    evaluate_again: bool = False,
) -> Tensor:
    """Noise is added from sigma `noisy_from` down to `noisy_to`; outside it is an ODE solver.

    With `evaluate_again` (PECE) the model is called on the corrected latent too. Orders fall towards sigma 0.
    """
    total, levels, predictions = len(sigmas) - 1, [Level.of(sigma) for sigma in sigmas], []
    to_zero, predicted, tau, drawn = bool(sigmas[-1] == 0), x, 0.0, 0.0
    for index in range(total):
        sigma, following = sigmas[index], sigmas[index + 1]
        denoised = denoise(predicted, sigma)
        progress(index + 1, total, denoised)
        predictions = [*predictions[1 - CORRECTOR_ORDER :], denoised]
        left = total - 1 - index if to_zero else total
        if index == 0 or (following == 0 and not evaluate_again):
            x = predicted
        else:
            order = min(CORRECTOR_ORDER, len(predictions), left + 1)
            nodes = levels[index - order + 1 : index + 1]
            x = _adams(x, predictions, nodes, levels[index - 1], levels[index], tau) + drawn
            if evaluate_again:
                predictions[-1] = denoised = denoise(x, sigma)
        if following == 0:
            return denoised
        order = min(PREDICTOR_ORDER, len(predictions), left)
        nodes, target = levels[index - order + 1 : index + 1], levels[index + 1]
        tau = 1.0 if noisy_from >= float(following) >= noisy_to else 0.0
        fresh = following * (-(-2 * tau * (target.half_log_snr - levels[index].half_log_snr)).expm1()).sqrt()
        drawn = noise(sigma, following) * fresh if tau else 0.0
        predicted = _adams(x, predictions, nodes, levels[index], target, tau) + drawn
    return predicted


def _adams(
    x: Tensor, predictions: Sequence[Tensor], nodes: Sequence[Level], start: Level, end: Level, tau: float
) -> Tensor:
    """From `start` to `end`, by the polynomial through the last predictions, made at `nodes`; without fresh noise."""
    places = torch.stack([level.half_log_snr for level in nodes])
    moments = _moments(start.half_log_snr, end.half_log_snr, len(nodes), 1 + tau**2)
    weights = end.alpha * torch.linalg.solve(torch.vander(places, len(nodes), increasing=True).T, moments)
    recent = torch.stack(list(predictions[-len(nodes) :]), dim=1)
    gained = torch.tensordot(recent, weights.to(x.device), dims=([1], [0]))
    faded = (-(tau**2) * (end.half_log_snr - start.half_log_snr)).exp()
    return end.sigma / start.sigma * faded * x + gained


def _moments(start: Tensor, end: Tensor, count: int, growth: float) -> Tensor:
    """`growth * integral of exp(growth * (t - end)) * t ** p` from start to end, for p below `count`, by parts.

    Parts come from one matrix, through logarithms of factorials: the solve that follows makes their rounding large.
    """
    powers = torch.arange(count, dtype=start.dtype)
    edges = end**powers - start**powers * (-growth * (end - start)).exp()
    depth, factorials = powers.unsqueeze(1) - powers, (powers + 1).lgamma()
    logarithms = factorials.unsqueeze(1) - factorials
    if growth > 1:
        logarithms = logarithms - depth * math.log(growth)
    signs = torch.where(depth % 2 == 0, 1.0, -1.0)
    return (logarithms.exp() * signs).tril() @ edges
