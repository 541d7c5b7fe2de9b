"""Samplers: `(denoise, x, sigmas, *, progress, noise) -> x`.

`x` is the noised latent in model space, `sigmas` a falling float32 tensor on the CPU (so that no step waits for a
GPU). Guidance and what the model predicts live in `denoise`, which returns the denoised latent. Coefficients are worked
out in float32 by the formulas ComfyUI uses, since near sigma 0 their rounding shows in the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from .noise import StepNoise
from .unipc import Level, Update, predict_data

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(x, sigma) -> denoised`; `sigma` has no dims and lies on the CPU."""


class ReportStep(Protocol):
    """Told once in each step, after its model call; `step` counts from 1. What it raises ends the sampling."""

    def __call__(self, step: int, total: int, denoised: torch.Tensor) -> None: ...


class SampleLoop(Protocol):
    """From the noised latent at `sigmas[0]` to the latent at `sigmas[-1]`."""

    def __call__(
        self, denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, progress: ReportStep, noise: StepNoise
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Sampler:
    """A row of the table: the loop, and what KSampler does around it.

    `drops_penultimate`: the schedule is made one step longer and loses its last sigma before 0.
    `end_sigma`: what stands in for a final sigma of 0.
    """

    loop: SampleLoop
    drops_penultimate: bool = False
    end_sigma: float = 0.0


def euler(
    denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, progress: ReportStep, noise: StepNoise
) -> torch.Tensor:
    """Euler steps down the probability flow (Karras et al. 2022, arXiv:2206.00364, algorithm 2 without churn)."""
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        x = x + (x - denoised) / sigma * (following - sigma)
    return x


def euler_ancestral(
    denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, progress: ReportStep, noise: StepNoise
) -> torch.Tensor:
    """Euler steps that go below the next sigma and come back to it with fresh noise, for flow models.

    A flow latent at sigma is `(1 - sigma) * picture + sigma * noise`. One steps down to `lower = following ** 2 / sigma`,
    scales so that the share of the picture is that of `following`, and adds the noise that is missing.
    """
    total = len(sigmas) - 1
    for step, (sigma, following) in enumerate(pairwise(sigmas), start=1):
        denoised = denoise(x, sigma)
        progress(step, total, denoised)
        if following == 0:
            return denoised
        lower = following * (1 + (following / sigma - 1))
        kept = lower / sigma
        scale = (1 - following) / (1 - lower)
        added = (following**2 - lower**2 * (1 - following) ** 2 / (1 - lower) ** 2) ** 0.5
        x = scale * (kept * x + (1 - kept) * denoised) + noise(sigma, following) * added
    return x


def dpmpp_2m(
    denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, progress: ReportStep, noise: StepNoise
) -> torch.Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, algorithm 2), in `time = -log(sigma)`; to 0 by first order."""
    total = len(sigmas) - 1
    times = [-sigma.log() for sigma in sigmas]
    earlier = None
    for step, (time, following) in enumerate(pairwise(times), start=1):
        denoised = denoise(x, sigmas[step - 1])
        progress(step, total, denoised)
        stride, slope = following - time, denoised
        if earlier is not None and sigmas[step] > 0:
            half = 1 / (2 * ((time - times[step - 2]) / stride))
            slope = (1 + half) * denoised - half * earlier
        x = (-following).exp() / (-time).exp() * x - (-stride).expm1() * slope
        earlier = denoised
    return x


def uni_pc(
    denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, progress: ReportStep, noise: StepNoise
) -> torch.Tensor:
    """UniPC with B(h) = h, order 3 (Zhao et al. 2023, arXiv:2302.04867), predicting data; see `unipc`.

    The order falls to 1 towards the end. With a single step it is 0: as in ComfyUI, what comes back is the starting
    noise, rescaled. Raises `ValueError` for sigmas that repeat, between which it has no slope.
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
        update = Update.of(y, predictions[-order:], levels[step - order : step + 1])
        y = update.predicted()
        if step < total:
            prediction = predict_data(denoise, y, levels[step])
            progress(step + 1, total, prediction)
            y = update.corrected(prediction)
            predictions = [*predictions[-2:], prediction]
    return y / levels[-1].alpha


SAMPLERS: dict[str, Sampler] = {
    "euler": Sampler(euler),
    "euler_ancestral": Sampler(euler_ancestral),
    "dpmpp_2m": Sampler(dpmpp_2m),
    "uni_pc": Sampler(uni_pc, drops_penultimate=True, end_sigma=0.001),
}
