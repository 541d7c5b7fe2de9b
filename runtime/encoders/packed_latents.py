"""Latents as a family's nodes have them -> as its autoencoder has them, where the two differ, and back.

Flux.2's are four places of the autoencoder's as one, and normalised by statistics that are in its file (a batch norm).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SIDE = 2


def unpacked(latent: torch.Tensor, autoencoder: nn.Module) -> torch.Tensor:
    """`(B, 4 C, H, W)` -> `(B, C, 2 H, 2 W)`; as it is for an autoencoder without such statistics."""
    statistics = getattr(autoencoder, "bn", None)
    if statistics is None:
        return latent
    mean, std = _moments(statistics)
    return F.pixel_shuffle(latent * std + mean, SIDE)


def packed(latent: torch.Tensor, autoencoder: nn.Module) -> torch.Tensor:
    """The other way round."""
    statistics = getattr(autoencoder, "bn", None)
    if statistics is None:
        return latent
    mean, std = _moments(statistics)
    return (F.pixel_unshuffle(latent, SIDE) - mean) / std


def _moments(statistics: nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation, each `(1, C, 1, 1)`."""
    std = torch.sqrt(statistics.running_var + statistics.eps)
    return statistics.running_mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)
