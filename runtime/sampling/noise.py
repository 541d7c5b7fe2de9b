"""The noise ComfyUI draws: before the first step, and between steps for the samplers that add some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

import torch
import torchsde

StepNoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(sigma, sigma_next) -> noise` of the latent's shape; every call draws anew."""


Step = tuple[float, float]
DIGITS = 6
"""What torchsde rounds the ends of a tree to; beyond them it knows nothing, and says so."""


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
    return BrownianNoise(torch.zeros_like(x, device="cpu"), sigmas, seed=seed, device=x.device)


def brownian_noise_gpu(x: torch.Tensor, sigmas: torch.Tensor, *, seed: int, cpu_offset: int = 1) -> StepNoise:
    """The same, drawn where `x` is: other numbers on a GPU, and the same on a CPU."""
    return BrownianNoise(torch.zeros_like(x), sigmas, seed=seed, device=x.device)


class BrownianNoise:
    """ComfyUI's use of torchsde: a tree from the lowest sigma above 0 to the highest, its increments scaled to spread 1.

    An increment takes some twenty draws of the latent's size. So that of the step to come is drawn by a thread while the
    model works on this one; the tree gives the same numbers in whatever order it is asked.
    """

    def __init__(self, start: torch.Tensor, sigmas: torch.Tensor, *, seed: int, device: torch.device) -> None:
        levels = [level for level in sigmas.tolist() if level > 0]
        self._tree = torchsde.BrownianTree(min(levels), start, max(levels), entropy=seed)
        self._ends = round(min(levels), DIGITS), round(max(levels), DIGITS)
        self._device, self._thread = device, ThreadPoolExecutor(max_workers=1)
        self._following = dict(pairwise(levels))
        self._begun: dict[Step, Future[torch.Tensor]] = {}

    def __call__(self, sigma: torch.Tensor, sigma_next: torch.Tensor) -> torch.Tensor:
        """The increment from one sigma to another, over the root of their distance."""
        step = float(sigma), float(sigma_next)
        increment = self._begin(step)
        del self._begun[step]
        for level in reversed(step):
            if level in self._following:
                self._begin((level, self._following[level]))
                break
        return increment.result().to(self._device) / (sigma_next - sigma).abs().sqrt()

    def _begin(self, step: Step) -> Future[torch.Tensor]:
        if step not in self._begun:
            self._begun[step] = self._thread.submit(self._increment, *step)
        return self._begun[step]

    def _increment(self, sigma: float, sigma_next: float) -> torch.Tensor:
        low, high = (min(max(level, self._ends[0]), self._ends[1]) for level in sorted((sigma, sigma_next)))
        increment = self._tree(low, high)
        return increment if sigma < sigma_next else -increment
