"""What a sampler is: the shapes of its parts, and a row of the table.

A sampler is `(denoise, x, sigmas, *, progress, noise) -> x`: `x` is the noised latent in model space, `sigmas` a falling
float32 tensor on the CPU (so that no step waits for a GPU). Guidance and what the model predicts live in `denoise`.
Coefficients are worked out in float32 by the formulas ComfyUI uses, since near sigma 0 and 1 their rounding shows in the
picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..noise import MakeNoise, StepNoise, step_noise


class Denoise(Protocol):
    """`(x, sigma) -> denoised`, guided; `sigma` has no dims and lies on the CPU."""

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor: ...

    def both(self, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The guided prediction and that of the negative prompt alone, of one model call."""
        ...


class ReportStep(Protocol):
    """Told once in each step, after its first model call; `step` counts from 1. What it raises ends the sampling."""

    def __call__(self, step: int, total: int, denoised: torch.Tensor) -> None: ...


class SampleLoop(Protocol):
    """From the noised latent at `sigmas[0]` to the latent at `sigmas[-1]`."""

    def __call__(
        self,
        denoise: Denoise,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        progress: ReportStep,
        noise: StepNoise,
        **knobs: float,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Sampler:
    """A row of the table: the loop, and what KSampler does around it.

    `drops_penultimate`: the schedule is made one step longer and loses its last sigma before 0.
    `end_sigma`: what stands in for a final sigma of 0.
    `make_noise`: where the noise between steps comes from.
    `starts_below_1`: a first sigma of 1, where log(alpha / sigma) is infinite, is taken 1/10000 of the way further.
    `negative`: the loop asks for the negative prediction too, also at cfg 1.
    `renoises_anew`: behind a mask, what is kept is noised with other noise than that of the start.
    `percents`: knobs of the loop that are sigmas, each at a fraction of the way from 1 to 0.
    """

    loop: SampleLoop
    drops_penultimate: bool = False
    end_sigma: float = 0.0
    make_noise: MakeNoise = step_noise
    starts_below_1: bool = False
    negative: bool = False
    renoises_anew: bool = False
    percents: Mapping[str, float] = field(default_factory=dict)
