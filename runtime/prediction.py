"""What a transformer says, as the denoised latent that samplers work with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .families.spec import FamilySpec
from .protocol import Conditioning

TIMESTEPS = 1000


class Predictor:
    """`(x, sigma, conditioning) -> denoised`: one branch of guidance, in float32, in the model's space."""

    def __init__(self, model: nn.Module, family: FamilySpec, *, dtype: torch.dtype) -> None:
        self._model, self._family, self._dtype = model, family, dtype

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """`x` is `(B, C, F, H, W)`, `sigma` has no dims, the conditioning is of the same batch, device and dtype."""
        inputs = {argument: getattr(conditioning, field) for argument, field in self._family.inputs}
        timestep = (sigma * TIMESTEPS).to(x.device).expand(x.shape[0])
        padded = pad_to_patch(x.to(self._dtype), self._family.patch)
        output = self._model(hidden_states=padded, timestep=timestep, return_dict=False, **inputs)[0]
        output = output[tuple(slice(size) for size in x.shape)]
        return x - output.float() * sigma


def pad_to_patch(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """A latent whose last dims are multiples of the patch: made longer by what stands at the other end, as in ComfyUI."""
    padding = []
    for size, step in zip(reversed(latent.shape[2:]), reversed(patch), strict=True):
        padding += [0, -size % step]
    return F.pad(latent, padding, mode="circular") if any(padding) else latent
