"""The noise ComfyUI draws: before the first step, and between steps for the samplers that add some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

StepNoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(sigma, sigma_next) -> noise` of the latent's shape; every call draws anew."""


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


def step_noise(x: torch.Tensor, *, seed: int, cpu_offset: int = 1) -> StepNoise:
    """Noise between steps, drawn where `x` is.

    On a CPU, ComfyUI from 0.7 on adds 1 to the seed, since the first draw would be the starting noise once more; before
    that it added nothing (`cpu_offset` 0). On a GPU the numbers are the GPU's own, and the seed is taken as it is.
    """
    if x.device.type == "cpu":
        seed = (seed + cpu_offset) % (1 << 64)
    generator = torch.Generator(x.device).manual_seed(seed)
    return lambda sigma, sigma_next: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
