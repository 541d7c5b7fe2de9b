"""What a `Sample` request asks for, in numbers: the table of noise levels, the sigmas to walk and the noise to start from."""

from __future__ import annotations

import torch

from .families.spec import FamilySpec
from .protocol import Sample
from .sampling import FlowTable, FluxTable, check_sigmas, cut_sigmas, draw_noise, make_sigmas, shift_of_size
from .settings import SampleSettings

TABLES = {table.size: table for table in (FlowTable, FluxTable)}
TOKEN_PIXELS = 16
"""Side of what ModelSamplingFlux counts as a token, in pixels."""


def flow_table(settings: SampleSettings, family: FamilySpec, latent: torch.Size) -> FlowTable:
    """The noise levels of a family, or those that the shift widgets set, for latents of this shape."""
    if settings.shift:
        return FlowTable(shift=settings.shift, multiplier=family.timestep_scale)
    if settings.max_shift:
        high, wide = (side * family.latent.spatial for side in latent[-2:])
        tokens = wide * high / TOKEN_PIXELS**2
        return FluxTable(shift=shift_of_size(tokens, highest=settings.max_shift, base=settings.base_shift))
    return TABLES[family.sigma_table](shift=family.shift, multiplier=family.timestep_scale)


def sigmas_of(request: Sample, table: FlowTable) -> torch.Tensor:
    """The sigmas of the steps to run, on the CPU; none where there is nothing to do.

    A single one that the user brought is the level to noise the latent to, without a step. Raises `ValueError` for one that
    leaves nothing of it.
    """
    settings = request.settings
    if request.sigmas is not None:
        sigmas = check_sigmas(request.sigmas.cpu())
        if len(sigmas) == 1 and not settings.start_at_step:
            if sigmas[0] >= 1:
                raise ValueError(f"sigmas holds only {sigmas[0]:g}, all noise: connect two noise levels or more")
            return sigmas
    else:
        names = {"sampler_name": settings.sampler_name, "denoise": settings.denoise}
        sigmas = make_sigmas(settings.scheduler, settings.steps, table=table, **names)
    steps = {"start": settings.start_at_step, "end": settings.end_at_step}
    return cut_sigmas(sigmas, **steps, leftover_noise=settings.leftover_noise)


def noise_of(request: Sample, latent: torch.Tensor) -> torch.Tensor:
    """The noise to start from, of the latent's shape, float32 on the CPU. Raises `ValueError` for noise of another shape.

    It is drawn as exact as the latent came: ComfyUI with `--fp16-intermediates` rounds it, too.
    """
    if request.noise is None and not request.settings.add_noise:
        return torch.zeros_like(latent)
    dtype = request.latent.dtype if request.latent.is_floating_point() else torch.float32
    drawn = {"seed": request.settings.seed, "batch_index": request.batch_index, "dtype": dtype}
    if request.noise is None:
        return draw_noise(latent.shape, **drawn).float()
    noise = request.noise.float().cpu()
    noise = noise.unsqueeze(2) if noise.ndim == latent.ndim - 1 else noise
    if noise.shape == latent.shape:
        return noise
    if not noise.any():
        return torch.zeros_like(latent)
    if torch.equal(noise, draw_noise(request.noise.shape, **drawn).float().view_as(noise)):
        return draw_noise(latent.shape, **drawn).float()  # made for an empty latent, before it took the model's shape
    raise ValueError(
        f"the noise has shape {tuple(noise.shape)}, but this model samples {tuple(latent.shape)}: connect a latent "
        f"of this model, so that the noise is made for it"
    )
