"""Samplers: `(denoise, x, sigmas, *, progress, noise) -> x`.

`x` is the noised latent in model space, `sigmas` a falling float32 tensor on the CPU (so that no step waits for a
GPU). Guidance and what the model predicts live in `denoise`, which returns the denoised latent (x0). Coefficients are
worked out in float32 as ComfyUI does: near sigma 0 their rounding shows in the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .noise import StepNoise

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(x, sigma) -> denoised`; `sigma` has no dims and lies on the CPU."""


class ReportStep(Protocol):
    """Told after each step's model call: `step` of `total` steps (from 1), and the latent as the model sees it done."""

    def __call__(self, step: int, total: int, denoised: torch.Tensor) -> None: ...


SampleLoop = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Sampler:
    """A row of the table: the loop, and what KSampler does around it.

    `drops_penultimate`: the schedule is made one step longer and loses its last sigma before 0.
    `end_sigma`: what stands for a final sigma of 0.
    """

    loop: SampleLoop
    drops_penultimate: bool = False
    end_sigma: float = 0.0


def euler(
    denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor, *, progress: ReportStep, noise: StepNoise
) -> torch.Tensor:
    """Euler steps along the probability flow (Karras et al. 2022, arXiv:2206.00364, algorithm 2 without churn)."""
    raise NotImplementedError


SAMPLERS: dict[str, Sampler] = {"euler": Sampler(euler)}
