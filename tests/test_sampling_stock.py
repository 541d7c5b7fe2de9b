"""Noise, sigmas and samplers equal the real ComfyUI's."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from runtime import sampling
from runtime.families import FAMILIES
from runtime.sample_inputs import flow_table
from runtime.sampling.noise import step_noise
from runtime.settings import SAMPLER_NAMES, SCHEDULER_NAMES, SampleSettings
from tests.stock import ask_comfyui, relative_error
from tests.stock_comfyui import ANALYTIC, velocity

pytestmark = pytest.mark.comfy

SHIFTS = (1.0, 3.0, 8.0, 0.009)
SIGMAS = [
    {"scheduler": scheduler, "steps": steps, "shift": shift, "sampler_name": sampler_name, "denoise": denoise}
    for scheduler, steps, shift, (sampler_name, denoise) in product(
        SCHEDULER_NAMES,
        (1, 2, 3, 4, 6, 7, 13, 20, 33, 100, 250, 999, 1000, 1500),
        SHIFTS,
        (("euler", 1.0), ("euler", 0.99995), ("uni_pc", 1.0), ("euler", 0.7), ("uni_pc", 0.3), ("euler", 0.0)),
    )
]
SIZES = {
    "wan": (1, 16, 3, 60, 104),
    "flux": (1, 16, 90, 128),
    "flux-schnell": (1, 16, 128, 128),
    "qwen": (1, 16, 1, 64, 96),
}
NODES = {
    "": {},
    "ModelSamplingSD3": {"shift": 3.0},
    "ModelSamplingAuraFlow": {"shift": 1.73},
    "ModelSamplingFlux": {"max_shift": 1.2, "base_shift": 0.4},
}
"""Each node that sets the shift, and its widgets, which are ours too."""
SHIFT_CASES = [
    {"family": family, "node": node, "scheduler": scheduler, "steps": steps, "percents": [0.0, 0.1, 0.37, 0.9, 1.0]}
    for family, node, scheduler, steps in product(SIZES, NODES, SCHEDULER_NAMES, (4, 7, 30))
    if node != ("ModelSamplingAuraFlow" if family == "wan" else "ModelSamplingSD3")
]
"""The nodes that a family is used with: the other one of these two tells the model a timestep on the wrong scale."""
NOISE = [
    {"shape": shape, "seed": seed, "batch_index": batch_index}
    for (shape, batch_index), seed in product(
        [
            ((1, 16, 1, 8, 8), None),
            ((3, 16, 3, 5, 7), None),
            ((2, 3, 1, 3, 3), None),
            ((1, 1, 1, 1, 3), None),
            ((2, 16, 6, 6), [2, 0]),
            ((4, 16, 1, 6, 6), [5, 1, 5, 0]),
            ((2, 3, 3, 3), [1, 1]),
            ((3, 16, 4, 4), [0, 1, 2]),
        ],
        (0, 1, 2**32 + 7, 2**64 - 1),
    )
]
MEAN_STD = {
    "mean": (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
             0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    "std": (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
            3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
}  # fmt: skip
"""Of Wan 2.1's latents."""
INPUTS = {
    "empty": torch.zeros(1, 16, 1, 6, 8),
    "picture": torch.randn(2, 16, 2, 5, 6, generator=torch.Generator().manual_seed(3)),
    "four_dims": torch.zeros(1, 4, 5, 6),
    "prompt": torch.zeros(1, 4, 8),
}
STARTS = ((1.0, "empty"), (0.7, "picture"), (0.3, "picture"))
"""denoise, and the latent."""
WHOLE = [
    {"sampler_name": sampler_name, "scheduler": scheduler, "steps": steps, "denoise": denoise, "latent": latent}
    for sampler_name, scheduler, steps, (denoise, latent) in product(
        SAMPLER_NAMES, SCHEDULER_NAMES, (1, 2, 6, 20), STARTS
    )
]
SOME = [case for case in WHOLE[::13] if case["steps"] < 20]
"""Steps, denoise and schedule differ from one to the next: 13 goes into none of their counts."""
EDGES = [
    {"sampler_name": sampler_name, "scheduler": "simple", "steps": steps, "denoise": denoise, "latent": latent}
    for sampler_name in ("euler", "euler_ancestral", "dpmpp_2m", "uni_pc", "dpmpp_sde", "sa_solver")
    for steps, denoise, latent in ((3, 1.0, "four_dims"), (3, 0.0, "four_dims"), (3, 1.0, "picture"))
]
LIMIT = 1e-6


def ask(folder, samples: list[dict], **more: list[dict]) -> dict[str, torch.Tensor]:
    """ComfyUI's results for these samples, all with the same seed and model."""
    fixed = {"model": ANALYTIC, "seed": 11, "cfg": 1.0, "positive": "prompt", "negative": "prompt"}
    return ask_comfyui(folder, inputs=INPUTS, samples=[fixed | case for case in samples], **more)


def stock_widgets(case: dict) -> dict:
    """The case with the widgets of its node; ModelSamplingFlux is told the size of the picture."""
    widgets, (high, wide) = NODES[case["node"]], SIZES[case["family"]][-2:]
    size = {"width": 8 * wide, "height": 8 * high} if case["node"] == "ModelSamplingFlux" else {}
    return case | {"widgets": widgets | size}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """One run of ComfyUI for every test of this file but the last."""
    return ask(
        tmp_path_factory.mktemp("stock"),
        [*SOME, *EDGES],
        sigmas=SIGMAS,
        noise=NOISE,
        shifts=[stock_widgets(case) for case in SHIFT_CASES],
    )


def test_sigmas_are_comfyuis_to_the_bit(stock):
    for number, case in enumerate(SIGMAS):
        names = {name: case[name] for name in ("sampler_name", "denoise")}
        table, theirs = sampling.FlowTable(shift=case["shift"]), stock[f"sigmas.{number}"]
        if theirs.isnan().any():
            with pytest.raises(ValueError, match="kl_optimal"):
                sampling.make_sigmas(case["scheduler"], case["steps"], table=table, **names)
            continue
        ours = sampling.make_sigmas(case["scheduler"], case["steps"], table=table, **names)
        assert torch.equal(ours, theirs), case


def test_shifts_are_those_of_comfyuis_nodes_and_families_to_the_bit(stock):
    for number, case in enumerate(SHIFT_CASES):
        settings = SampleSettings(**NODES[case["node"]])
        table = flow_table(settings, FAMILIES[case["family"]], torch.Size(SIZES[case["family"]]))
        sigmas = sampling.make_sigmas(case["scheduler"], case["steps"], table=table, sampler_name="euler")
        percents = torch.tensor([table.percent_to_sigma(percent) for percent in case["percents"]])
        assert torch.equal(torch.cat([sigmas, percents]), stock[f"shifts.{number}"]), case


def test_noise_is_comfyuis_to_the_bit(stock):
    for number, case in enumerate(NOISE):
        assert torch.equal(sampling.draw_noise(**case), stock[f"noise.{number}"]), case


def test_samplers_give_comfyuis_latents(stock):
    compare([*SOME, *EDGES], stock)


@pytest.mark.full
def test_samplers_give_comfyuis_latents_over_the_whole_grid(tmp_path):
    compare(WHOLE, ask(tmp_path, WHOLE))


def compare(cases: list[dict], stock: dict[str, torch.Tensor]) -> None:
    """Check every case that ComfyUI has, and print the worst of each sampler."""
    errors, offset = {}, int(stock["step_seed_offset"])
    for number, case in enumerate(cases):
        theirs = stock.get(f"samples.{number}")
        if theirs is None and "does not have it" in bytes(stock[f"errors.{number}"].tolist()).decode():
            continue
        if theirs is None or not theirs.isfinite().all():
            assert (case["scheduler"], case["steps"]) == ("kl_optimal", 1)
            with pytest.raises(ValueError, match="kl_optimal"):
                sample_analytic(case, cpu_noise_offset=offset)
            continue
        error = relative_error(sample_analytic(case, cpu_noise_offset=offset), theirs)
        errors.setdefault(case["sampler_name"], {})[str(case)] = error
    for name, own in errors.items():
        worst = max(own, key=own.get)
        print(f"{name}: {len(own)} cases, worst relative error {own[worst]:.1e} at {worst}")
    assert len(errors) > 40
    assert not {case: error for own in errors.values() for case, error in own.items() if not error <= LIMIT}


class AnalyticDenoise:
    """`velocity` as the samplers call a model; both prompts see the same."""

    def __init__(self, table: sampling.FlowTable) -> None:
        self._table = table

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return x - velocity(x, self._table.timestep(sigma).expand(x.shape[0])) * sigma

    def both(self, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self(x, sigma),) * 2


@torch.inference_mode()
def sample_analytic(case: dict, *, cpu_noise_offset: int) -> torch.Tensor:
    """The way of a latent through the engine, with `velocity` for a model."""
    latent = sampling.fit_empty_latent(INPUTS[case["latent"]], channels=16, dims=3)
    table, names = sampling.FlowTable(shift=8.0), {"sampler_name": case["sampler_name"]}
    sigmas = sampling.make_sigmas(case["scheduler"], case["steps"], table=table, denoise=case["denoise"], **names)
    if not len(sigmas):
        return latent
    noise = sampling.draw_noise(latent.shape, seed=11)
    latent = sampling.to_model_space(latent, **MEAN_STD)
    knobs = {"seed": 11, "cpu_noise_offset": cpu_noise_offset, "progress": lambda step, total, denoised: None}
    x = sampling.run_sampler(AnalyticDenoise(table), noise, latent, sigmas, table=table, **names, **knobs)
    return sampling.from_model_space(x, **MEAN_STD)


def test_noise_between_steps_starts_where_comfyuis_does(stock):
    offset = int(stock["step_seed_offset"])
    drawn = step_noise(torch.zeros(4), torch.tensor([1.0, 0.0]), highest=1.0, seed=0, cpu_offset=offset)(None, None)
    assert torch.equal(drawn, torch.randn(4, generator=torch.Generator().manual_seed(offset)))
