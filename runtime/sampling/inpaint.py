"""Sampling behind a mask: what is kept stays the latent's, at every noise level."""

from __future__ import annotations

import torch

from .latents import scale_noise
from .samplers import Denoise


class MaskedDenoise:
    """`(x, sigma) -> denoised` that looks at the latent, noised to `sigma`, where the mask is 0, and answers with it there.

    `mask` is 1 where the picture is painted anew; values between blend. `noise` None: the latent is looked at as it is.
    """

    def __init__(
        self, denoise: Denoise, mask: torch.Tensor, *, noise: torch.Tensor | None, latent: torch.Tensor
    ) -> None:
        self._denoise, self._mask, self._kept = denoise, mask, 1.0 - mask
        self._noise, self._latent = noise, latent

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The prediction at `sigma`."""
        return self._kept_in(self._denoise(self._noised(x, sigma), sigma))

    def both(self, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The prediction, and that of the negative prompt alone, which knows no mask."""
        denoised, negative = self._denoise.both(self._noised(x, sigma), sigma)
        return self._kept_in(denoised), negative

    def _noised(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        known = self._latent if self._noise is None else scale_noise(self._noise, self._latent, sigma=sigma)
        return x * self._mask + known * self._kept

    def _kept_in(self, denoised: torch.Tensor) -> torch.Tensor:
        return denoised * self._mask + self._latent * self._kept
