"""Noise levels of flow models, and steps from one to another that add fresh noise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Level:
    """`x = alpha * picture + sigma * noise` with `half_log_snr = log(alpha / sigma)`. Float32, no dims."""

    sigma: Tensor
    half_log_snr: Tensor

    @classmethod
    def of(cls, sigma: Tensor) -> Level:
        """The level of a sigma."""
        return cls(sigma, half_log_snr(sigma))

    @classmethod
    def at(cls, half_log_snr: Tensor) -> Level:
        """The level of half a log-SNR."""
        return cls(half_log_snr.neg().sigmoid(), half_log_snr)

    @property
    def alpha(self) -> Tensor:
        """Share of the picture; with the rounding of the log-SNR, as in ComfyUI."""
        return self.sigma * self.half_log_snr.exp()

    @property
    def ratio(self) -> Tensor:
        """Noise over picture, `sigma / alpha`: the sigma that the level has for models that only add noise."""
        return self.half_log_snr.neg().exp()


def half_log_snr(sigma: Tensor) -> Tensor:
    """`log((1 - sigma) / sigma)` of a flow model."""
    return sigma.logit().neg()


def slope(x: Tensor, sigma: Tensor, denoised: Tensor) -> Tensor:
    """`dx / dsigma` along the probability flow."""
    return (x - denoised) / sigma


def ancestral(sigma: Tensor, following: Tensor, *, eta: float = 1.0) -> tuple[Tensor, Tensor | float]:
    """Where to step down to, and how much fresh noise leads back up to `following` (Karras et al. 2022, eq. 8 there).

    For latents to which noise is only added. From an infinite `sigma` all noise is fresh.
    """
    if not eta:
        return following, 0.0
    fresh = eta * (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5
    up = fresh if fresh < following else following
    return (following**2 - up**2) ** 0.5, up


@dataclass(frozen=True)
class Renoise:
    """An ancestral step of a flow model: go down to `lower`, then `scale * x + added * noise` is a latent of `following`.

    A flow latent at sigma is `(1 - sigma) * picture + sigma * noise`; `scale` brings the share of the picture to that of
    `following`, and `added` is the noise that is then missing.
    """

    lower: Tensor
    scale: Tensor
    added: Tensor

    @classmethod
    def of(cls, sigma: Tensor, following: Tensor) -> Renoise:
        """For a step from `sigma`; the lower it goes in one step, the more noise is fresh."""
        lower = following * (1 + (following / sigma - 1))
        scale = (1 - following) / (1 - lower)
        added = (following**2 - lower**2 * (1 - following) ** 2 / (1 - lower) ** 2) ** 0.5
        return cls(lower, scale, added)

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        """From the latent at `lower` to one at `following`."""
        return self.scale * x + noise * self.added
