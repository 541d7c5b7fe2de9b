"""A rough picture of a latent, without a VAE."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .families.spec import LatentFormat


def preview_image(denoised: torch.Tensor, latent: LatentFormat) -> torch.Tensor:
    """`(H, W, 3)` uint8 of the first item (and frame) of a latent in model space, by a linear map of its channels."""
    first = denoised[0, :, 0] if denoised.ndim == 5 else denoised[0]
    factors = torch.tensor(latent.rgb, dtype=first.dtype, device=first.device)
    bias = torch.tensor(latent.rgb_bias, dtype=first.dtype, device=first.device)
    picture = F.linear(first.movedim(0, -1), factors.T, bias)
    return ((picture + 1.0) / 2.0).clamp(0, 1).mul(255).to("cpu", torch.uint8)
