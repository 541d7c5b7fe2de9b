"""Samplers by themselves, on models that are formulas: what must hold whatever ComfyUI does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from runtime import sampling
from runtime.errors import Cancelled
from runtime.settings import SAMPLER_NAMES, SampleSettings

TABLE = sampling.FlowTable(shift=3.0)
SHAPE = (2, 16, 1, 4, 6)


OWN_STEPS = ("dpm_fast", "dpm_adaptive")
"""Only use the ends of a schedule, have steps of their own, and stop at the last sigma above 0."""
CFG_PP = tuple(name for name in SAMPLER_NAMES if name.endswith("_cfg_pp"))
CALLS = {
    "heun": 11, "heunpp2": 15, "dpm_2": 11, "dpm_2_ancestral": 11, "dpm_fast": 6, "dpmpp_2s_ancestral": 11,
    "dpmpp_2s_ancestral_cfg_pp": 11, "dpmpp_sde": 11, "dpmpp_sde_gpu": 11, "seeds_2": 11, "seeds_3": 16,
    "exp_heun_2_x0": 11, "exp_heun_2_x0_sde": 11, "sa_solver_pece": 11,
}  # fmt: skip
"""Of the model in 6 steps, where they are not 6."""
EXACT = (
    "euler", "euler_cfg_pp", "heun", "exp_heun_2_x0", "dpm_2", "lms", "dpmpp_2m", "dpmpp_2m_cfg_pp", "ipndm",
    "deis", "res_multistep", "res_multistep_cfg_pp", "gradient_estimation", "ddim", "uni_pc", "uni_pc_bh2",
)  # fmt: skip
"""Solve the probability flow, the better the more steps. (ipndm_v does not: see its weights.)"""
STOCHASTIC = (
    "euler_ancestral", "euler_ancestral_cfg_pp", "dpm_2_ancestral", "dpmpp_2s_ancestral", "exp_heun_2_x0_sde",
    "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde", "er_sde", "seeds_2", "seeds_3", "sa_solver",
    "sa_solver_pece",
)  # fmt: skip
"""Draw from the flow's pictures. (The others add noise as if noise were only added, not mixed in.)"""


class Model:
    """A denoiser from a formula, that keeps the sigmas it was called at."""

    def __init__(self, formula):
        self.calls, self._formula = [], formula

    def __call__(self, x, sigma):
        self.calls.append(sigma)
        return self._formula(x, sigma)

    def both(self, x, sigma):
        return (self(x, sigma),) * 2


def spread_of_a_half(x, sigma):
    """The exact denoiser for pictures drawn from a normal distribution of spread 0.5."""
    return x * (1 - sigma) * 0.25 / ((1 - sigma) ** 2 * 0.25 + sigma**2)


def run(
    sampler_name, *, denoise, steps=6, scheduler="simple", progress=lambda step, total, denoised: None, check=lambda: None,
    shape=SHAPE,
):  # fmt: skip
    sigmas = sampling.make_sigmas(scheduler, steps, table=TABLE, sampler_name=sampler_name)
    noise, latent = sampling.draw_noise(shape, seed=1), torch.zeros(shape)
    denoise = denoise if isinstance(denoise, Model) else Model(denoise)
    return sampling.run_sampler(
        denoise, noise, latent, sigmas, table=TABLE, sampler_name=sampler_name, seed=1, progress=progress, check=check
    )  # fmt: skip


def test_settings_know_who_needs_the_negative_prompt():
    assert {name for name, sampler in sampling.SAMPLERS.items() if sampler.negative} == set(CFG_PP)
    for name in SAMPLER_NAMES:
        assert SampleSettings(cfg=1.0, sampler_name=name).needs_negative == (name in CFG_PP)
        assert SampleSettings(cfg=1.5, sampler_name=name).needs_negative


@pytest.mark.parametrize("sampler_name", [name for name in SAMPLER_NAMES if name not in OWN_STEPS])
@pytest.mark.parametrize("steps", [2, 3, 20])
def test_sampler_ends_on_the_picture_when_the_model_knows_it(sampler_name, steps):
    picture = torch.full(SHAPE, 0.3)
    assert torch.allclose(run(sampler_name, denoise=lambda x, sigma: picture, steps=steps), picture, atol=5e-3)


@pytest.mark.parametrize("sampler_name", EXACT)
def test_sampler_comes_near_the_exact_solution(sampler_name):
    """For pictures drawn from a normal distribution of spread 0.5 the flow is known: it scales the noise by 0.5."""
    result = run(sampler_name, denoise=spread_of_a_half, steps=150)
    exact = 0.5 * sampling.draw_noise(SHAPE, seed=1)
    assert float((result - exact).abs().max() / exact.abs().max()) < 0.05


@pytest.mark.parametrize("sampler_name", OWN_STEPS)
def test_solvers_with_own_steps_come_near_the_solution_at_the_last_sigma(sampler_name):
    """They do not go to 0: what they leave of the noise is seen in the result."""
    result = run(sampler_name, denoise=spread_of_a_half, steps=60, scheduler="karras")
    exact = 0.5 * sampling.draw_noise(SHAPE, seed=1)
    assert float((result - exact).abs().max() / exact.abs().max()) < 0.05


@pytest.mark.parametrize("sampler_name", STOCHASTIC)
def test_stochastic_sampler_draws_pictures_of_the_right_spread(sampler_name):
    result = run(sampler_name, denoise=spread_of_a_half, steps=60, shape=(1, 16, 1, 24, 24))
    start = sampling.draw_noise((1, 16, 1, 24, 24), seed=1)
    assert float(result.std()) == pytest.approx(0.5, abs=0.07)
    assert not torch.allclose(result, 0.5 * start, atol=0.1)


@pytest.mark.parametrize("sampler_name", CFG_PP)
def test_cfg_pp_takes_the_noise_from_the_negative_prediction(sampler_name):
    class Guided(Model):
        def both(self, x, sigma):
            return self(x, sigma), negative(x)

    def negative(x):
        return 0.2 * x

    ours = run(sampler_name, denoise=Guided(lambda x, sigma: 0.5 * x))
    assert not torch.allclose(ours, run(sampler_name, denoise=lambda x, sigma: 0.5 * x), atol=1e-3)


@pytest.mark.parametrize("scheduler", ["simple", "ddim_uniform", "kl_optimal"])
@pytest.mark.parametrize("sampler_name", [name for name in SAMPLER_NAMES if name not in OWN_STEPS])
def test_progress_is_told_once_in_each_step(sampler_name, scheduler):
    told, model = [], Model(lambda x, sigma: x * 0.5)
    run(
        sampler_name, denoise=model, scheduler=scheduler, steps=6,
        progress=lambda step, total, denoised: told.append((step, total, denoised.shape)),
    )  # fmt: skip
    steps = len(sampling.make_sigmas(scheduler, 6, table=TABLE, sampler_name=sampler_name)) - 1
    assert told == [(step, steps, torch.Size(SHAPE)) for step in range(1, steps + 1)]
    assert all(sigma.ndim == 0 and sigma.device.type == "cpu" for sigma in model.calls)
    if steps == 6:
        assert len(model.calls) == CALLS.get(sampler_name, 6)


@pytest.mark.parametrize("sampler_name", OWN_STEPS)
def test_progress_of_own_steps_rises_to_its_total(sampler_name):
    told, model = [], Model(lambda x, sigma: x * 0.5)
    run(sampler_name, denoise=model, steps=6, progress=lambda step, total, denoised: told.append((step, total)))
    steps, totals = zip(*told, strict=True)
    assert list(steps) == sorted(steps) and steps[0] == 1 and set(totals) == {steps[-1]}
    assert sampler_name == "dpm_adaptive" or len(model.calls) == CALLS[sampler_name]


@pytest.mark.parametrize("sampler_name", SAMPLER_NAMES)
def test_cancel_is_possible_between_any_two_model_calls(sampler_name):
    events = []

    def denoise(x, sigma):
        events.append("call")
        return x * 0.5

    def progress(step, total, denoised):
        events.append("step")

    run(sampler_name, denoise=denoise, progress=progress, check=lambda: events.append("check"))
    assert all("call" not in pair or set(pair) != {"call"} for pair in pairwise(events)), events
    assert events[-1] != "call", events  # what went wrong in the last call is told of as well
    for last in range(1, min(8, events.count("call"))):
        calls, points = [], []

        def stop(*_, calls=calls, points=points, last=last):
            points.append(len(calls))
            if len(calls) == last:
                raise Cancelled

        def counted(x, sigma, calls=calls):
            calls.append(sigma)
            return x * 0.5

        with pytest.raises(Cancelled):
            run(sampler_name, denoise=counted, progress=stop, check=stop)
        assert len(calls) == last


def test_uni_pc_refuses_more_steps_than_the_schedule_has():
    with pytest.raises(ValueError, match=r"uni_pc cannot take 1500 steps.*use fewer"):
        run("uni_pc", denoise=lambda x, sigma: x, steps=1500)


def test_sigmas_given_are_left_as_they_are():
    sigmas = sampling.make_sigmas("simple", 4, table=TABLE, sampler_name="uni_pc")
    before = sigmas.clone()
    noise, silent = sampling.draw_noise(SHAPE, seed=1), lambda step, total, denoised: None
    sampling.run_sampler(
        lambda x, sigma: x, noise, torch.zeros(SHAPE), sigmas, table=TABLE, sampler_name="uni_pc", seed=1, progress=silent
    )  # fmt: skip
    assert torch.equal(sigmas, before)


@pytest.mark.parametrize("sampler_name", SAMPLER_NAMES)
def test_no_tensor_of_the_caller_or_the_model_is_changed(sampler_name):
    seen = []

    def watched(x, sigma):
        denoised = spread_of_a_half(x, sigma)
        seen.extend((tensor, tensor.clone()) for tensor in (x, sigma, denoised))
        return denoised

    noise, latent, mask = torch.randn(SHAPE), torch.randn(SHAPE), torch.rand(2, 1, 1, 4, 6)
    seen += [(tensor, tensor.clone()) for tensor in (noise, latent, mask)]
    for given in (None, mask):
        sigmas = torch.tensor([0.9, 0.7, 0.5, 0.3, 0.1])
        sampling.run_sampler(
            Model(watched), noise, latent, sigmas, table=TABLE, sampler_name=sampler_name, seed=1, mask=given,
            progress=lambda step, total, denoised: None,
        )  # fmt: skip
    assert len(seen) > 20 and all(torch.equal(tensor, before) for tensor, before in seen)


def test_dpm_adaptive_goes_up_again_the_way_it_came_down():
    loop, x = sampling.SAMPLERS["dpm_adaptive"].loop, torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    ways = {"progress": lambda step, total, denoised: None, "noise": None}
    low = loop(Model(spread_of_a_half), x, torch.tensor([0.9, 0.2]), **ways)
    back = loop(Model(spread_of_a_half), low, torch.tensor([0.2, 0.9]), **ways)
    assert float((low - x).abs().max()) > 0.5 and float((back - x).abs().max()) < 0.1


def test_dpm_adaptive_ends_where_the_model_gives_no_numbers():
    assert run("dpm_adaptive", denoise=lambda x, sigma: x * float("nan")).isnan().all()
