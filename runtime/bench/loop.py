"""What the loop around the transformer costs: sampler, guidance, prediction, preview and progress."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from ..families.wan import WAN
from ..guidance import Denoiser, Entry
from ..prediction import Predictor
from ..previews import preview_image
from ..protocol import Conditioning
from ..sampling import SAMPLERS, FlowTable, draw_noise, make_sigmas, run_sampler
from ..sampling.noise import step_noise
from .sides import say

FORWARD_SECONDS = 0.5
"""The forward pass that the cost is held against. The stand-in takes it where noise is drawn while the model works."""
LATENT = (1, 16, 1, 128, 128)
"""A picture of 1024 x 1024."""
STEPS, ROUNDS = 8, 3
CFG = 5.0


class Stub(nn.Module):
    """Stands in for the transformer and takes a given time: its answer is ready."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._answer = torch.randn(2 * LATENT[0], *LATENT[1:])
        self._seconds, self.waited, self.calls = seconds, 0.0, 0

    def forward(self, hidden_states: torch.Tensor, **inputs: object) -> tuple[torch.Tensor]:
        started = time.perf_counter()
        if self._seconds:
            time.sleep(self._seconds)  # the processor is free meanwhile, as it is while a GPU works
        self.waited += time.perf_counter() - started
        self.calls += 1
        return (self._answer[: hidden_states.shape[0]],)


@torch.inference_mode()
def measure() -> dict[str, dict[str, float]]:
    """`overhead_percent` by sampler: time around one forward, in percent of one of half a second."""
    percents = {}
    for number, name in enumerate(SAMPLERS, start=1):
        percents[name] = 100 * _seconds_around_forward(name) / FORWARD_SECONDS
        say(f"{number} of {len(SAMPLERS)}: {name} {percents[name]:.2f} %")
    return {"overhead_percent": percents}


def described(figures: dict[str, dict[str, float]]) -> str:
    """The figures for a reader."""
    lines = [f"  {name:<30} {percent:.2f} %" for name, percent in figures["overhead_percent"].items()]
    return "\n".join([f"The loop around a forward of {FORWARD_SECONDS} s adds (less than 1 % is wanted):", *lines])


def _seconds_around_forward(sampler_name: str) -> float:
    """Median over rounds of the time that one model call has around it."""
    stub = Stub(0.0 if SAMPLERS[sampler_name].make_noise is step_noise else FORWARD_SECONDS)
    predict = Predictor(stub, WAN, dtype=torch.float32)
    prompt = Entry(Conditioning(embedding=torch.randn(1, WAN.text_length, WAN.tiny["text_dim"])))
    table = FlowTable(shift=WAN.shift)
    sigmas = make_sigmas("simple", STEPS, table=table, sampler_name=sampler_name)
    noise, latent = draw_noise(LATENT, seed=0), torch.zeros(LATENT)

    def one_round() -> float:
        stub.waited, stub.calls, started = 0.0, 0, time.perf_counter()
        denoise = Denoiser(predict, [[prompt], [prompt]], scales=[CFG], batch=LATENT[0])
        run_sampler(denoise, noise, latent, sigmas, table=table, sampler_name=sampler_name, seed=0, progress=_report)
        return (time.perf_counter() - started - stub.waited) / stub.calls

    one_round()
    return statistics.median(one_round() for _ in range(ROUNDS))


def _report(step: int, total: int, denoised: torch.Tensor) -> None:
    """What each step of a job does beside sampling: its picture."""
    preview_image(denoised, WAN.latent)
