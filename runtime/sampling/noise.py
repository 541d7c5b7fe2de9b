"""The noise ComfyUI draws: before the first step, and between steps for the samplers that add some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from threading import Event
from typing import Protocol

import torch

from .brownian import BrownianMotion

StepNoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(sigma, sigma_next) -> noise` of the latent's shape; every call draws anew."""


HEAD_START = 0.01
"""Seconds by which the model's call goes first: two threads that share an interpreter hold each other up."""

Step = tuple[float, float]
Strides = Callable[[torch.Tensor, torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""`(sigma, following) -> the (sigma, sigma_next)` that a step draws noise for, in order."""


class MakeNoise(Protocol):
    """The noise between the steps of one run, for latents like `x` and the sigmas that the sampler walks.

    `highest` is the sigma of the schedule that the walk begins at or a little below.
    """

    def __call__(
        self, x: torch.Tensor, sigmas: torch.Tensor, *, highest: float, seed: int, cpu_offset: int = 1
    ) -> StepNoise: ...


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


def step_noise(x: torch.Tensor, sigmas: torch.Tensor, *, highest: float, seed: int, cpu_offset: int = 1) -> StepNoise:
    """Independent noise between steps, drawn where `x` is.

    On a CPU, ComfyUI from 0.7 on adds 1 to the seed, since the first draw would be the starting noise once more; before
    that it added nothing (`cpu_offset` 0). On a GPU the numbers are the GPU's own, and the seed is taken as it is.
    """
    if x.device.type == "cpu":
        seed = (seed + cpu_offset) % (1 << 64)
    generator = torch.Generator(x.device).manual_seed(seed)
    return lambda sigma, sigma_next: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def one_stride(sigma: torch.Tensor, following: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Of a sampler that draws once a step, for all of it."""
    yield sigma, following


def brownian_noise(
    x: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    highest: float,
    seed: int,
    cpu_offset: int = 1,
    strides: Strides = one_stride,
    on_cpu: bool = True,
) -> StepNoise:
    """Increments of one Brownian motion over sigma, scaled to spread 1: the same motion for every number of steps.

    It spans the lowest sigma above 0 to the highest. Drawn `on_cpu`, or where `x` is: other numbers on a GPU, and the
    same on a CPU.
    """
    like = torch.zeros_like(x, device="cpu") if on_cpu else torch.zeros_like(x)
    steps = [(float(start), float(end)) for pair in pairwise(sigmas) if min(pair) > 0 for start, end in strides(*pair)]
    lowest = min(level for level in (highest, *sigmas.tolist()) if level > 0)
    motion = BrownianMotion(lowest, highest, like=like, seed=seed)
    return NoiseAhead(motion, steps, device=x.device)


class NoiseAhead:
    """The increments of a motion, of which a thread draws the next one while the model works: from `draw_ahead` on.

    An increment takes some twenty draws of the latent's size. The motion is the same in whatever order it is asked, so
    a step that was not foreseen costs time and nothing else.
    """

    def __init__(self, motion: BrownianMotion, steps: Iterable[Step], *, device: torch.device) -> None:
        self._motion, self._steps, self._device = motion, iter(steps), device
        self._thread, self._asked = ThreadPoolExecutor(max_workers=1), Event()
        self._ahead: tuple[Step, Future[torch.Tensor]] | None = None

    def draw_ahead(self) -> None:
        """Begin the next increment, where it is not begun yet."""
        if self._ahead is None and (step := next(self._steps, None)):
            self._asked.clear()
            self._ahead = step, self._thread.submit(self._after_head_start, step)

    def __call__(self, sigma: torch.Tensor, sigma_next: torch.Tensor) -> torch.Tensor:
        """The increment from one sigma to another, over the root of their distance; the caller's to change."""
        self.draw_ahead()
        self._asked.set()
        asked, ahead, self._ahead = (float(sigma), float(sigma_next)), self._ahead, None
        drawn = ahead[1] if ahead and ahead[0] == asked else self._thread.submit(self._increment, asked)
        return drawn.result().to(self._device)

    def _after_head_start(self, step: Step) -> torch.Tensor:
        self._asked.wait(HEAD_START)
        return self._increment(step)

    def _increment(self, step: Step) -> torch.Tensor:
        increment = self._motion.increment(min(step), max(step))
        start, end = torch.tensor(step)
        return increment.div_((end - start).abs().sqrt() * (1 if end > start else -1))
