"""Sigma schedules of flow models, equal to ComfyUI's to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from .samplers import SAMPLERS


@dataclass(frozen=True)
class FlowTable:
    """The noise levels of a flow model: `sigma = shift * t / (1 + (shift - 1) * t)` for t in (0, 1], `size` of them.

    `multiplier` times sigma is the timestep that the model is told. (ComfyUI's ModelSamplingDiscreteFlow, which
    ModelSamplingSD3 sets with the multiplier 1000, and ModelSamplingAuraFlow with 1.)
    """

    shift: float = 1.0
    multiplier: float = 1000
    size: int = 1000

    @cached_property
    def sigmas(self) -> torch.Tensor:
        """(size,) float32, rising."""
        return self.sigma(torch.arange(1, self.size + 1) / self.size * self.multiplier)

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        """What the model is told for a sigma."""
        return sigma * self.multiplier

    def sigma(self, timestep: torch.Tensor) -> torch.Tensor:
        """Sigma of a timestep in (0, multiplier]."""
        return self._shifted(timestep / self.multiplier)

    def percent_to_sigma(self, percent: float) -> float:
        """Sigma at a fraction of the way: 0 is the start (sigma 1), 1 the end (sigma 0)."""
        if percent <= 0.0:
            return 1.0
        if percent >= 1.0:
            return 0.0
        return self._shifted(1.0 - percent)

    def _shifted(self, t):
        return t if self.shift == 1.0 else self.shift * t / (1 + (self.shift - 1) * t)


@dataclass(frozen=True)
class FluxTable(FlowTable):
    """The noise levels of Flux and its like: the same curve in finer steps, rounded differently. (ModelSamplingFlux.)"""

    multiplier: float = 1.0
    size: int = 10000

    def _shifted(self, t):
        return self.shift / (self.shift + (1 / t - 1))


def shift_of_size(tokens: float, *, highest: float, base: float) -> float:
    """The shift that ModelSamplingFlux sets: `exp` of what lies between `base`, for 256 tokens, and `highest`, for 4096."""
    slope = (highest - base) / (4096 - 256)
    return math.exp(tokens * slope + (base - slope * 256))


def simple(table: FlowTable, steps: int) -> torch.Tensor:
    """Every size/steps-th entry of the table, from the top."""
    stride = len(table.sigmas) / steps
    picked = [-(1 + int(step * stride)) for step in range(steps)]
    return _with_zero(table.sigmas[picked])


def sgm_uniform(table: FlowTable, steps: int) -> torch.Tensor:
    """Timesteps at even distance; the last, at the lowest sigma, left out."""
    return _with_zero(table.sigma(_even_timesteps(table, steps + 1)[:-1]))


def normal(table: FlowTable, steps: int) -> torch.Tensor:
    """Timesteps at even distance, down to the lowest sigma, which stands for zero when it is that small."""
    lowest = float(table.sigma(table.timestep(table.sigmas[0])))
    if math.isclose(lowest, 0, abs_tol=0.00001):
        return table.sigma(_even_timesteps(table, steps + 1))
    return _with_zero(table.sigma(_even_timesteps(table, steps)))


def beta(table: FlowTable, steps: int, *, alpha: float = 0.6, beta: float = 0.6) -> torch.Tensor:
    """Timesteps at quantiles of a beta distribution (Lee et al. 2024, arXiv:2407.12173). Equal ones are taken once."""
    from scipy.stats import beta as beta_distribution  # not before it is needed: it takes memory of every rank

    highest = len(table.sigmas) - 1
    quantiles = [1.0 - step / steps for step in range(steps)]
    # The very function ComfyUI calls: the middle quantile falls between two indices, where the last bit decides.
    indices = [round(share * highest) for share in beta_distribution.ppf(quantiles, alpha, beta).tolist()]
    return _with_zero(table.sigmas[list(dict.fromkeys(indices))])


def karras(table: FlowTable, steps: int) -> torch.Tensor:
    """Even distances in the seventh root of sigma (Karras et al. 2022, arXiv:2206.00364, equation 5)."""
    highest, lowest = (float(table.sigmas[end]) ** (1 / 7) for end in (-1, 0))
    return _with_zero((highest + torch.linspace(0, 1, steps) * (lowest - highest)) ** 7)


def exponential(table: FlowTable, steps: int) -> torch.Tensor:
    """Even distances in log(sigma)."""
    highest, lowest = (math.log(float(table.sigmas[end])) for end in (-1, 0))
    return _with_zero(torch.linspace(highest, lowest, steps).exp())


def ddim_uniform(table: FlowTable, steps: int) -> torch.Tensor:
    """Every so many entries of the table, counted from its second one up; the first sigma is below the highest.

    It has `steps` or more steps. A second entry that is nearly 0 stands for zero.
    """
    is_zero = math.isclose(float(table.sigmas[1]), 0, abs_tol=0.00001)
    stride = max(len(table.sigmas) // (steps + is_zero), 1)
    sigmas = table.sigmas[1::stride].flip(0)
    return sigmas if is_zero else _with_zero(sigmas)


def linear_quadratic(table: FlowTable, steps: int, *, threshold: float = 0.025) -> torch.Tensor:
    """Half of the steps for the first 1/40 of the way, evenly; the others in strides that grow (Genmo's Mochi)."""
    if steps == 1:
        return torch.tensor([1.0, 0.0]) * table.sigmas[-1]
    linear = steps // 2
    quadratic = steps - linear
    left = linear - threshold * steps
    bend = left / (linear * quadratic**2)
    slope = threshold / linear - 2 * left / quadratic**2
    start = [step * threshold / linear for step in range(linear)]
    end = [bend * step**2 + slope * step + bend * linear**2 for step in range(linear, steps)]
    return torch.tensor([1.0 - done for done in (*start, *end, 1.0)]) * table.sigmas[-1]


def kl_optimal(table: FlowTable, steps: int) -> torch.Tensor:
    """Even distances in the arctangent of sigma (Sabour et al. 2024, arXiv:2404.14507). Raises `ValueError` for one step."""
    if steps == 1:
        raise ValueError("the kl_optimal schedule takes 2 steps or more: raise steps, or choose another scheduler")
    highest, lowest = (math.atan(float(table.sigmas[end])) for end in (-1, 0))
    places = torch.arange(steps) / (steps - 1)
    return _with_zero((places * lowest + (1 - places) * highest).tan())


Schedule = Callable[[FlowTable, int], torch.Tensor]
SCHEDULERS: dict[str, Schedule] = {
    "simple": simple,
    "sgm_uniform": sgm_uniform,
    "karras": karras,
    "exponential": exponential,
    "ddim_uniform": ddim_uniform,
    "beta": beta,
    "normal": normal,
    "linear_quadratic": linear_quadratic,
    "kl_optimal": kl_optimal,
}


def make_sigmas(
    scheduler: str, steps: int, *, table: FlowTable, sampler_name: str, denoise: float = 1.0
) -> torch.Tensor:
    """The sigmas that KSampler would use: float32 on the CPU, falling, the last one 0.

    `(steps + 1,)`, or fewer where the schedule has fewer to give, or `(0,)` for `denoise` 0: nothing to do. With
    `denoise` below 1 they are the last of a longer schedule, of `steps / denoise` steps.
    """
    if denoise <= 0.0:
        return torch.empty(0)
    total = steps if denoise > 0.9999 else int(steps / denoise)
    if SAMPLERS[sampler_name].drops_penultimate:
        sigmas = SCHEDULERS[scheduler](table, total + 1)
        sigmas = torch.cat([sigmas[:-2], sigmas[-1:]])
    else:
        sigmas = SCHEDULERS[scheduler](table, total)
    return sigmas if denoise > 0.9999 else sigmas[-(steps + 1) :]


def cut_sigmas(sigmas: torch.Tensor, *, start: int, end: int, leftover_noise: bool) -> torch.Tensor:
    """The sigmas of the steps from `start` to `end`, as KSamplerAdvanced picks them; `(0,)` where no step is left.

    An `end` before the last step cuts the schedule short; its last sigma is then 0, unless `leftover_noise` is wanted.
    """
    last = len(sigmas) - 1
    if end < last:
        sigmas = sigmas[: end + 1].clone()
        if not leftover_noise:
            sigmas[-1] = 0
    return sigmas[start:] if start < len(sigmas) - 1 else sigmas[:0]


def check_sigmas(sigmas: torch.Tensor) -> torch.Tensor:
    """Sigmas that a user brought, as the samplers take them. Raises `ValueError` for what is no schedule."""
    if sigmas.ndim != 1 or not sigmas.is_floating_point():
        raise ValueError(
            f"sigmas has shape {tuple(sigmas.shape)} and dtype {sigmas.dtype}: connect a list of noise levels"
        )
    if not sigmas.isfinite().all() or (sigmas < 0).any():
        raise ValueError(f"sigmas holds {sigmas.tolist()[:8]}: every noise level must be a number, and none below 0")
    return sigmas.float()


def _even_timesteps(table: FlowTable, count: int) -> torch.Tensor:
    ends = table.timestep(table.sigmas[[-1, 0]])
    return torch.linspace(float(ends[0]), float(ends[1]), count)


def _with_zero(sigmas: torch.Tensor) -> torch.Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)])
