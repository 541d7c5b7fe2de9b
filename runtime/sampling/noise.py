"""The noise ComfyUI draws: before the first step, and between steps for the samplers that add some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torchsde

StepNoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(sigma, sigma_next) -> noise` of the latent's shape; every call draws anew."""


class MakeNoise(Protocol):
    """The noise between the steps of one run, for latents like `x` and the sigmas of its schedule."""

    def __call__(self, x: torch.Tensor, sigmas: torch.Tensor, *, seed: int, cpu_offset: int = 1) -> StepNoise: ...


def draw_noise(
    shape: Sequence[int], *, seed: int, batch_index: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Noise of `shape` (B, ...) on the CPU, drawn for the whole batch at once.

    With `batch_index` one noise is drawn for each index from 0 up; item i gets that of `batch_index[i]`, and items that
    name the same index share it. Call it with the shape the model samples in (after `latents.fit_empty_latent`).
    """
    if batch_index is not None and len(batch_index) != shape[0]:
        raise ValueError(f"batch_index {list(batch_index)} does not have one index for each of {shape[0]} latents")
    generator = torch.Generator("cpu").manual_seed(seed)
    if batch_index is None:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    drawn = [torch.randn((1, *shape[1:]), generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([drawn[index] for index in batch_index]).to(dtype)


def step_noise(x: torch.Tensor, sigmas: torch.Tensor, *, seed: int, cpu_offset: int = 1) -> StepNoise:
    """Independent noise between steps, drawn where `x` is.

    On a CPU, ComfyUI from 0.7 on adds 1 to the seed, since the first draw would be the starting noise once more; before
    that it added nothing (`cpu_offset` 0). On a GPU the numbers are the GPU's own, and the seed is taken as it is.
    """
    if x.device.type == "cpu":
        seed = (seed + cpu_offset) % (1 << 64)
    generator = torch.Generator(x.device).manual_seed(seed)
    return lambda sigma, sigma_next: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def brownian_noise(x: torch.Tensor, sigmas: torch.Tensor, *, seed: int, cpu_offset: int = 1) -> StepNoise:
    """Increments of one Brownian motion over sigma, drawn on the CPU: the same for every number of steps."""
    return _brownian(torch.zeros_like(x, device="cpu"), sigmas, seed=seed, device=x.device)


def brownian_noise_gpu(x: torch.Tensor, sigmas: torch.Tensor, *, seed: int, cpu_offset: int = 1) -> StepNoise:
    """The same, drawn where `x` is: other numbers on a GPU, and the same on a CPU."""
    return _brownian(torch.zeros_like(x), sigmas, seed=seed, device=x.device)


def _brownian(start: torch.Tensor, sigmas: torch.Tensor, *, seed: int, device: torch.device) -> StepNoise:
    """ComfyUI's use of torchsde: a tree from the lowest sigma above 0 to the highest, its increments scaled to spread 1."""
    tree = torchsde.BrownianTree(sigmas[sigmas > 0].min(), start, sigmas.max(), entropy=seed)

    def noise(sigma: torch.Tensor, sigma_next: torch.Tensor) -> torch.Tensor:
        low, high = sorted((sigma, sigma_next))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # its ends are rounded to six digits, and it says so of each sigma at an end
            increment = tree(low, high).to(device)
        return (increment if sigma is low else -increment) / (sigma_next - sigma).abs().sqrt()

    return noise
