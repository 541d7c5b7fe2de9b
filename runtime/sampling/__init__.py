"""Noise, schedules and samplers that give ComfyUI's numbers."""

from .latents import fit_empty_latent, fit_noise_mask, from_model_space, resize_empty_latent, to_model_space
from .loop import run_sampler
from .noise import draw_noise
from .samplers import SAMPLERS, Denoise, ReportStep
from .schedules import SCHEDULERS, FlowTable, FluxTable, check_sigmas, cut_sigmas, make_sigmas, shift_of_size

__all__ = [
    "SAMPLERS",
    "SCHEDULERS",
    "Denoise",
    "FlowTable",
    "FluxTable",
    "ReportStep",
    "check_sigmas",
    "cut_sigmas",
    "draw_noise",
    "fit_empty_latent",
    "fit_noise_mask",
    "from_model_space",
    "make_sigmas",
    "resize_empty_latent",
    "run_sampler",
    "shift_of_size",
    "to_model_space",
]
