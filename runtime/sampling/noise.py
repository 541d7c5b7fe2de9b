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

    With `batch_index`, item i gets the noise that item `batch_index[i]` of a larger batch would get; items that name
    the same index share it. Call it with the shape the model samples in (after `latents.fit_empty_latent`).
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if batch_index is None:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    if len(batch_index) != shape[0]:
        raise ValueError(f"batch_index {list(batch_index)} has {len(batch_index)} entries for a batch of {shape[0]}")
    # One draw per index, as ComfyUI does: torch draws in blocks of 16, so one large draw need not hold the same numbers.
    drawn = [torch.randn((1, *shape[1:]), generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([drawn[index] for index in batch_index]).to(dtype)


def step_noise(x: torch.Tensor, *, seed: int) -> StepNoise:
    """Noise between steps, drawn where `x` is.

    On a CPU the generator is seeded with `seed + 1`, or the first draw would be the starting noise once more.
    (ComfyUI 0.3.75 does just that; newer versions add the one.)
    """
    generator = torch.Generator(x.device).manual_seed(seed + 1 if x.device.type == "cpu" else seed)
    return lambda sigma, sigma_next: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
