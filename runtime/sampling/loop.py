"""One run of a sampler, from noise and latent to the result, as KSampler frames it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .inpaint import MaskedDenoise
from .latents import scale_noise, unscale_noise
from .noise import NoiseAhead, StepNoise, draw_noise
from .samplers import SAMPLERS, Denoise, ReportStep
from .schedules import FlowTable

NEARLY_START = 1e-4
"""The part of the way at which samplers start that cannot at sigma 1."""


def run_sampler(
    denoise: Denoise,
    noise: torch.Tensor,
    latent: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    table: FlowTable,
    sampler_name: str,
    seed: int,
    progress: ReportStep,
    check: Callable[[], object] = lambda: None,
    cpu_noise_offset: int = 1,
    mask: torch.Tensor | None = None,
    keep_clean: bool = False,
) -> torch.Tensor:
    """Noise the latent to `sigmas[0]`, run the sampler, undo the scaling of the last sigma. All in model space.

    `sigmas` comes from `schedules.make_sigmas` (on the CPU; with a single one there is no step) and is left as it is.
    `noise` and `latent` lie on the model's device. `seed` and `cpu_noise_offset` are for the samplers that draw noise
    between steps; see `noise.step_noise`. Between two model calls of one step, and after the last where no step is told of
    after it, `check` is called: what it raises ends the sampling. `mask` is 1 where the latent is painted anew and 0 where it is kept; see `inpaint`. With `keep_clean` the
    model sees what is kept without noise.
    """
    sampler, x = SAMPLERS[sampler_name], scale_noise(noise, latent, sigma=sigmas[0])
    if sigmas[-1] == 0:
        sigmas = torch.cat([sigmas[:-1], sigmas.new_tensor([sampler.end_sigma])])
    if len(sigmas) == 1:
        return unscale_noise(x, sigma=sigmas[0])
    if mask is not None:
        kept = draw_noise(noise.shape, seed=(seed + 1) % (1 << 64)).to(noise) if sampler.renoises_anew else noise
        denoise = MaskedDenoise(denoise, mask, noise=None if keep_clean else kept, latent=latent)
    highest, end = float(sigmas.max()), sigmas[-1]
    if sampler.starts_below_1 and sigmas[0] >= 1:
        sigmas = torch.cat([sigmas.new_tensor([table.percent_to_sigma(NEARLY_START)]), sigmas[1:]])
    between = sampler.make_noise(x, sigmas, highest=highest, seed=seed, cpu_offset=cpu_noise_offset)
    knobs = {name: table.percent_to_sigma(percent) for name, percent in sampler.percents.items()}
    watched = _Watched(denoise, progress, check, between)
    x = sampler.loop(watched, x, sigmas, progress=watched.report, noise=between, **knobs)
    watched.end()
    return unscale_noise(x, sigma=end)


class _Watched:
    """A `denoise` that sees to it that every model call has a `progress` or a `check` behind it.

    Noise that can be drawn ahead is drawn while the model works, and not beside the sampler's own arithmetic.
    """

    def __init__(self, denoise: Denoise, progress: ReportStep, check: Callable[[], object], noise: StepNoise) -> None:
        self._denoise, self._progress, self._check, self._noise = denoise, progress, check, noise
        self._called = False

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self._before_call()
        return self._denoise(x, sigma)

    def both(self, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._before_call()
        return self._denoise.both(x, sigma)

    def report(self, step: int, total: int, denoised: torch.Tensor) -> None:
        """Pass a step on."""
        self._called = False
        self._progress(step, total, denoised)

    def end(self) -> None:
        """Stand at the end of the last step."""
        if self._called:
            self._check()

    def _before_call(self) -> None:
        if self._called:
            self._check()
        self._called = True
        if isinstance(self._noise, NoiseAhead):
            self._noise.draw_ahead()
