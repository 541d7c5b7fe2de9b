"""One run of a sampler, from noise and latent to the result, as KSampler frames it."""

from __future__ import annotations

import torch

from .latents import scale_noise, unscale_noise
from .noise import step_noise
from .samplers import SAMPLERS, Denoise, ReportStep


def run_sampler(
    denoise: Denoise,
    noise: torch.Tensor,
    latent: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    sampler_name: str,
    seed: int,
    progress: ReportStep,
    cpu_noise_offset: int = 1,
) -> torch.Tensor:
    """Noise the latent to `sigmas[0]`, run the sampler, undo the scaling of the last sigma. All in model space.

    `sigmas` comes from `schedules.make_sigmas` (on the CPU, at least two) and is left as it is. `noise` and `latent`
    lie on the model's device. `seed` and `cpu_noise_offset` are for the
    samplers that draw noise between steps; see `noise.step_noise`.
    """
    sampler = SAMPLERS[sampler_name]
    if sigmas[-1] == 0:
        sigmas = torch.cat([sigmas[:-1], sigmas.new_tensor([sampler.end_sigma])])
    x = scale_noise(noise, latent, sigma=sigmas[0])
    between = step_noise(x, seed=seed, cpu_offset=cpu_noise_offset)
    x = sampler.loop(denoise, x, sigmas, progress=progress, noise=between)
    return unscale_noise(x, sigma=sigmas[-1])
