"""What the loop around the transformer costs: sampler, guidance, prediction, preview and progress."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from ..families.wan import WAN
from ..guidance import Denoiser
from ..prediction import Predictor
from ..previews import preview_image
from ..protocol import Conditioning
from ..sampling import SAMPLERS, FlowTable, draw_noise, make_sigmas, run_sampler

FORWARD_SECONDS = 0.5
"""The forward pass that the cost is held against."""
LATENT = (1, 16, 1, 128, 128)
"""A picture of 1024 x 1024."""
STEPS, ROUNDS = 20, 9
CFG = 5.0


class Stub(nn.Module):
    """Stands in for the transformer and takes no time: its answer is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._answer = torch.randn(2 * LATENT[0], *LATENT[1:])

    def forward(self, hidden_states: torch.Tensor, **inputs: object) -> tuple[torch.Tensor]:
        return (self._answer[: hidden_states.shape[0]],)


@torch.inference_mode()
def measure() -> dict[str, dict[str, float]]:
    """`overhead_percent` by sampler: time of one step without the forward, in percent of one of half a second."""
    return {"overhead_percent": {name: 100 * _step_seconds(name) / FORWARD_SECONDS for name in SAMPLERS}}


def described(figures: dict[str, dict[str, float]]) -> str:
    """The figures for a reader."""
    lines = [f"  {name:<16} {percent:.2f} %" for name, percent in figures["overhead_percent"].items()]
    return "\n".join([f"The loop around a forward of {FORWARD_SECONDS} s adds (less than 1 % is wanted):", *lines])


def _step_seconds(sampler_name: str) -> float:
    """Median over rounds of the time one step takes."""
    predict = Predictor(Stub(), WAN, dtype=torch.float32)
    prompt = Conditioning(embedding=torch.randn(1, WAN.text_length, WAN.tiny["text_dim"]))
    table = FlowTable(shift=WAN.shift)
    sigmas = make_sigmas("simple", STEPS, table=table, sampler_name=sampler_name)
    noise, latent = draw_noise(LATENT, seed=0), torch.zeros(LATENT)

    def one_round() -> float:
        started = time.perf_counter()
        denoise = Denoiser(predict, [prompt], [prompt], cfg=CFG, batch=LATENT[0])
        run_sampler(denoise, noise, latent, sigmas, table=table, sampler_name=sampler_name, seed=0, progress=_report)
        return (time.perf_counter() - started) / (len(sigmas) - 1)

    one_round()
    return statistics.median(one_round() for _ in range(ROUNDS))


def _report(step: int, total: int, denoised: torch.Tensor) -> None:
    """What each step of a job does beside sampling: its picture."""
    preview_image(denoised, WAN.latent)
