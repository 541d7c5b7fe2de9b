"""Samplers, schedules and noise by themselves: what must hold whatever ComfyUI does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from runtime import sampling
from runtime.errors import Cancelled
from runtime.sampling.latents import scale_noise, unscale_noise
from runtime.sampling.noise import brownian_noise, brownian_noise_gpu, step_noise
from runtime.settings import SAMPLER_NAMES, SCHEDULER_NAMES, SampleSettings

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


def test_tables_hold_what_the_settings_offer_in_that_order():
    assert tuple(sampling.SAMPLERS) == SAMPLER_NAMES
    assert tuple(sampling.SCHEDULERS) == SCHEDULER_NAMES


def test_settings_know_who_needs_the_negative_prompt():
    assert {name for name, sampler in sampling.SAMPLERS.items() if sampler.negative} == set(CFG_PP)
    for name in SAMPLER_NAMES:
        assert SampleSettings(cfg=1.0, sampler_name=name).needs_negative == (name in CFG_PP)
        assert SampleSettings(cfg=1.5, sampler_name=name).needs_negative


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("simple", [1, 0.9, 0.75, 0.5, 0]),
        ("sgm_uniform", [1, 0.9004, 0.7511, 0.503, 0]),
        ("normal", [1, 0.8577, 0.6022, 0.0089, 0]),
        ("beta", [1, 0.9335, 0.7507, 0.3922, 0]),
        ("linear_quadratic", [1, 0.9875, 0.975, 0.725, 0]),
        ("ddim_uniform", [0.901, 0.7515, 0.5027, 0.006, 0]),
        ("karras", [1, 0.2327, 0.0368, 0.003, 0]),
        ("exponential", [1, 0.1441, 0.0208, 0.003, 0]),
        ("kl_optimal", [1, 0.5787, 0.2701, 0.003, 0]),
    ],
)
def test_schedules_at_shift_3_are_those_known(scheduler, expected):
    sigmas = sampling.make_sigmas(scheduler, 4, table=TABLE, sampler_name="euler")
    assert torch.allclose(sigmas, torch.tensor(expected), atol=1e-4)


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


def test_kl_optimal_refuses_one_step():
    with pytest.raises(ValueError, match="kl_optimal.*2 steps or more"):
        sampling.make_sigmas("kl_optimal", 1, table=TABLE, sampler_name="euler")


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


def test_denoise_below_1_takes_the_end_of_a_longer_schedule():
    longer = sampling.make_sigmas("normal", 20, table=TABLE, sampler_name="euler")
    assert torch.equal(sampling.make_sigmas("normal", 6, table=TABLE, sampler_name="euler", denoise=0.3), longer[-7:])
    assert sampling.make_sigmas("normal", 6, table=TABLE, sampler_name="euler", denoise=0.0).shape == (0,)


def test_noise_is_that_of_torch_manual_seed():
    state = torch.random.get_rng_state()
    ours = sampling.draw_noise(SHAPE, seed=7)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(ours, torch.randn(SHAPE, generator=torch.manual_seed(7)))


def test_batch_index_picks_the_noise_of_a_larger_batch():
    batch = sampling.draw_noise((4, *SHAPE[1:]), seed=7)
    picked = sampling.draw_noise((3, *SHAPE[1:]), seed=7, batch_index=(3, 1, 3))
    assert torch.equal(picked, batch[[3, 1, 3]])
    with pytest.raises(ValueError, match="each of 2"):
        sampling.draw_noise((2, 4, 4, 4), seed=7, batch_index=(1,))


def test_noise_between_steps_differs_from_the_starting_noise():
    x = torch.zeros(SHAPE)
    between = step_noise(x, torch.tensor([1.0, 0.0]), seed=7)
    first, second = between(None, None), between(None, None)
    assert not torch.equal(first, sampling.draw_noise(SHAPE, seed=7)) and not torch.equal(first, second)
    step_noise(x, torch.tensor([1.0, 0.0]), seed=2**64 - 1)


def test_brownian_noise_is_one_motion_for_every_number_of_steps():
    sigmas = torch.tensor([1.0, 0.7, 0.4, 0.1, 0.0])
    between = brownian_noise(torch.zeros(SHAPE), sigmas, seed=7)
    high, middle, low = sigmas[1:4]
    whole = between(high, low) * (high - low) ** 0.5
    parts = between(high, middle) * (high - middle) ** 0.5 + between(middle, low) * (middle - low) ** 0.5
    assert torch.allclose(whole, parts, atol=1e-5) and float(between(high, low).std()) == pytest.approx(1, abs=0.1)
    assert torch.equal(between(high, low), brownian_noise_gpu(torch.zeros(SHAPE), sigmas, seed=7)(high, low))
    brownian_noise(torch.zeros(SHAPE), sigmas, seed=2**64 - 1)(high, low)


def test_empty_latent_takes_the_models_shape():
    fitted = sampling.fit_empty_latent(torch.zeros(2, 4, 5, 6), channels=16, dims=3)
    assert fitted.shape == (2, 16, 1, 5, 6)
    assert sampling.fit_empty_latent(torch.zeros(2, 16, 5, 6), channels=4, dims=2).shape == (2, 4, 5, 6)


@pytest.mark.parametrize(("shape", "dims"), [((1, 4, 5, 6), 3), ((1, 16, 1, 5, 6), 2), ((1, 16, 5), 2)])
def test_latent_of_another_kind_is_refused_with_its_shape(shape, dims):
    with pytest.raises(ValueError, match="the latent has"):
        sampling.fit_empty_latent(torch.ones(shape), channels=16, dims=dims)


def test_model_space_and_back_is_where_one_was():
    latent = torch.randn(SHAPE)
    numbers = {"mean": [0.1 * index for index in range(16)], "std": [1 + 0.1 * index for index in range(16)]}
    there = sampling.to_model_space(latent, **numbers)
    assert torch.allclose(sampling.from_model_space(there, **numbers), latent, atol=1e-6)
    assert not sampling.to_model_space(torch.zeros(SHAPE), **numbers).any()


def test_leftover_noise_is_taken_up_where_it_was_left():
    sigma, x, latent = torch.tensor(0.4), torch.randn(SHAPE), torch.zeros(SHAPE)
    assert torch.allclose(scale_noise(latent, unscale_noise(x, sigma=sigma), sigma=sigma), x, atol=1e-6)
    assert float(TABLE.percent_to_sigma(0)) == 1 and float(TABLE.percent_to_sigma(1)) == 0
    assert TABLE.percent_to_sigma(0.5) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("latent", "spatial", "temporal", "shape"),
    [
        (torch.zeros(1, 16, 3, 8, 12), 2.0, 1.0, (1, 16, 3, 16, 24)),
        (torch.zeros(1, 16, 6, 8, 12), 0.5, 0.5, (1, 16, 3, 4, 6)),
        (torch.zeros(2, 16, 8, 12), 1.0, 2.0, (2, 16, 8, 12)),
        (torch.ones(1, 16, 3, 8, 12), 2.0, 2.0, (1, 16, 3, 8, 12)),
    ],
)
def test_only_an_empty_latent_of_another_vae_is_resized(latent, spatial, temporal, shape):
    resized = sampling.resize_empty_latent(latent, spatial=spatial, temporal=temporal)
    assert resized.shape == shape
    assert torch.equal(resized, latent if latent.any() else torch.zeros(shape))
