"""A rough picture of a latent, without a VAE."""

from __future__ import annotations

import torch

from .families.spec import LatentFormat


def preview_image(denoised: torch.Tensor, latent: LatentFormat) -> torch.Tensor:
    """`(H, W, 3)` uint8 of the first item (and frame) of a latent in model space, by a linear map of its channels."""
    first = denoised[0, :, 0] if denoised.ndim == 5 else denoised[0]
    factors = torch.tensor(latent.rgb, dtype=first.dtype, device=first.device)
    bias = torch.tensor(latent.rgb_bias, dtype=first.dtype, device=first.device)
    picture = torch.addmm(bias.unsqueeze(1), factors.T, first.flatten(1))
    picture = picture.add_(1.0).mul_(127.5).clamp_(0, 255).to("cpu", torch.uint8)
    return picture.unflatten(1, first.shape[1:]).movedim(0, -1).contiguous()
