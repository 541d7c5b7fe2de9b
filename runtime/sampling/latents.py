"""Latents in and out of a model's own space, and in and out of the noise, with ComfyUI's order of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F


def is_empty(latent: torch.Tensor) -> bool:
    """Whether the latent is all zeros: the mark of a latent that holds no picture."""
    return not bool(torch.count_nonzero(latent))


def fit_empty_latent(latent: torch.Tensor, *, channels: int, dims: int) -> torch.Tensor:
    """The latent in the shape a model samples in: `channels` channels and `dims` dims after them (2 or 3).

    Only an empty latent changes its channel count. A `(B, C, H, W)` latent for a video model gets one frame, and keeps
    it: KSampler returns 5 dims for 4. Raises `ValueError` for a latent that holds a picture of another model.
    """
    if latent.shape[1] != channels:
        if not is_empty(latent):
            raise ValueError(
                f"the latent has {latent.shape[1]} channels, but this model works on {channels}: "
                f"encode the picture with this model's VAE, or use an empty latent"
            )
        latent = latent.new_zeros((latent.shape[0], channels, *latent.shape[2:]))
    if dims == 3 and latent.ndim == 4:
        latent = latent.unsqueeze(2)
    if latent.ndim != dims + 2:
        raise ValueError(f"the latent has shape {tuple(latent.shape)}, but this model works on {dims + 2} dims")
    return latent


def resize_empty_latent(latent: torch.Tensor, *, spatial: float, temporal: float) -> torch.Tensor:
    """An empty latent made for another VAE in the size of this one's; a latent that holds a picture stays as it is.

    `spatial` and `temporal` are the other VAE's downscale over this one's. KSampler does the same since ComfyUI 0.11.
    """
    if not is_empty(latent):
        return latent
    height, width = (round(size * spatial) for size in latent.shape[-2:])
    frames = [max(1, round(latent.shape[2] * temporal))] if latent.ndim == 5 else []
    return latent.new_zeros((*latent.shape[:2], *frames, height, width))


def fit_noise_mask(mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A noise mask in the shape `(B, C, H, W)` or `(B, C, F, H, W)` of the latent.

    A mask without dims for channels and frames has its pictures taken as the batch, or as the frames of a video. Raises
    `ValueError` for one that does not fit in number.
    """
    batch, channels, *sizes = shape
    if mask.ndim < 2 or mask.ndim > 5:
        raise ValueError(f"the noise_mask has shape {tuple(mask.shape)}: use a mask of height and width")
    mask = mask.float()
    if len(sizes) == 2:
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
    elif mask.ndim < 5:
        mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    if mask.shape[1] > channels:
        raise ValueError(
            f"the noise_mask has {mask.shape[1]} channels, but the latent has {channels}: use a mask of 1 channel"
        )
    mask = F.interpolate(mask, size=sizes, mode="bilinear" if len(sizes) == 2 else "trilinear")
    if 1 < mask.shape[1] < channels:
        mask = mask.repeat(1, channels, *(1,) * len(sizes))[:, :channels]
    return mask.repeat(math.ceil(batch / mask.shape[0]), *(1,) * (mask.ndim - 1))[:batch]


def to_model_space(
    latent: torch.Tensor, *, mean: Sequence[float], std: Sequence[float], scale: float = 1.0
) -> torch.Tensor:
    """From the VAE's space to the model's; `mean` and `std` are per channel. An empty latent stays empty."""
    return latent if is_empty(latent) else into_model_space(latent, mean=mean, std=std, scale=scale)


def into_model_space(
    latent: torch.Tensor, *, mean: Sequence[float], std: Sequence[float], scale: float = 1.0
) -> torch.Tensor:
    """From the VAE's space to the model's, of a latent that is a picture also where it is all zeros."""
    return (latent - _per_channel(mean, latent)) * scale / _per_channel(std, latent)


def from_model_space(
    latent: torch.Tensor, *, mean: Sequence[float], std: Sequence[float], scale: float = 1.0
) -> torch.Tensor:
    """From the model's space to the VAE's, in float32."""
    latent = latent.to(torch.float32)
    return latent * _per_channel(std, latent) / scale + _per_channel(mean, latent)


def scale_noise(noise: torch.Tensor, latent: torch.Tensor, *, sigma: torch.Tensor) -> torch.Tensor:
    """The noised latent of a flow model at `sigma`."""
    return sigma * noise + (1.0 - sigma) * latent


def unscale_noise(x: torch.Tensor, *, sigma: torch.Tensor) -> torch.Tensor:
    """What a flow sampler hands on when it stops at `sigma`: the next one starts from it with `scale_noise`."""
    return x / (1.0 - sigma)


def _per_channel(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    shape = (1, len(values)) + (1,) * (like.ndim - 2)
    return torch.tensor(values, dtype=torch.float32).view(shape).to(like.device, like.dtype)
