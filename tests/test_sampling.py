"""Samplers, schedules and noise by themselves: what must hold whatever ComfyUI does."""

from __future__ import annotations

import pytest
import torch

from runtime import sampling
from runtime.errors import Cancelled
from runtime.sampling.latents import scale_noise, unscale_noise
from runtime.sampling.noise import step_noise
from runtime.settings import SAMPLER_NAMES, SCHEDULER_NAMES

TABLE = sampling.FlowTable(shift=3.0)
SHAPE = (2, 16, 1, 4, 6)


def run(sampler_name, *, denoise, steps=6, scheduler="simple", progress=lambda step, total, denoised: None):
    sigmas = sampling.make_sigmas(scheduler, steps, table=TABLE, sampler_name=sampler_name)
    noise, latent = sampling.draw_noise(SHAPE, seed=1), torch.zeros(SHAPE)
    return sampling.run_sampler(
        denoise, noise, latent, sigmas, sampler_name=sampler_name, seed=1, progress=progress
    )  # fmt: skip


def test_tables_hold_what_the_settings_offer():
    assert set(sampling.SAMPLERS) == set(SAMPLER_NAMES)
    assert set(sampling.SCHEDULERS) == set(SCHEDULER_NAMES)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("simple", [1, 0.9, 0.75, 0.5, 0]),
        ("sgm_uniform", [1, 0.9004, 0.7511, 0.503, 0]),
        ("normal", [1, 0.8577, 0.6022, 0.0089, 0]),
        ("beta", [1, 0.9335, 0.7507, 0.3922, 0]),
    ],
)
def test_schedules_at_shift_3_are_those_known(scheduler, expected):
    sigmas = sampling.make_sigmas(scheduler, 4, table=TABLE, sampler_name="euler")
    assert torch.allclose(sigmas, torch.tensor(expected), atol=1e-4)


@pytest.mark.parametrize("sampler_name", SAMPLER_NAMES)
@pytest.mark.parametrize("steps", [2, 3, 20])
def test_sampler_ends_on_the_picture_when_the_model_knows_it(sampler_name, steps):
    picture = torch.full(SHAPE, 0.3)
    assert torch.allclose(run(sampler_name, denoise=lambda x, sigma: picture, steps=steps), picture, atol=5e-3)


@pytest.mark.parametrize("sampler_name", ["euler", "dpmpp_2m", "uni_pc"])
def test_sampler_comes_near_the_exact_solution(sampler_name):
    """For pictures drawn from a normal distribution of spread 0.5 the flow is known: it scales the noise by 0.5."""

    def denoise(x, sigma):
        return x * (1 - sigma) * 0.25 / ((1 - sigma) ** 2 * 0.25 + sigma**2)

    result = run(sampler_name, denoise=denoise, steps=200 if sampler_name == "euler" else 40)
    exact = 0.5 * sampling.draw_noise(SHAPE, seed=1)
    assert float((result - exact).abs().max() / exact.abs().max()) < 0.05


@pytest.mark.parametrize("scheduler", SCHEDULER_NAMES)
@pytest.mark.parametrize("sampler_name", SAMPLER_NAMES)
def test_progress_is_told_once_in_each_step(sampler_name, scheduler):
    told, calls = [], []

    def denoise(x, sigma):
        calls.append(sigma)
        return x * 0.5

    run(
        sampler_name, denoise=denoise, scheduler=scheduler, steps=6,
        progress=lambda step, total, denoised: told.append((step, total, denoised.shape)),
    )  # fmt: skip
    assert told == [(step, 6, torch.Size(SHAPE)) for step in range(1, 7)]
    assert len(calls) == 6 and all(sigma.ndim == 0 and sigma.device.type == "cpu" for sigma in calls)


@pytest.mark.parametrize("sampler_name", SAMPLER_NAMES)
def test_cancel_ends_the_sampling_at_its_step(sampler_name):
    calls = []

    def denoise(x, sigma):
        calls.append(1)
        return x

    def progress(step, total, denoised):
        if step == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        run(sampler_name, denoise=denoise, progress=progress)
    assert len(calls) == 3


def test_uni_pc_refuses_more_steps_than_the_schedule_has():
    with pytest.raises(ValueError, match=r"uni_pc cannot take 1500 steps.*use fewer"):
        run("uni_pc", denoise=lambda x, sigma: x, steps=1500)


def test_sigmas_given_are_left_as_they_are():
    sigmas = sampling.make_sigmas("simple", 4, table=TABLE, sampler_name="uni_pc")
    before = sigmas.clone()
    noise, silent = sampling.draw_noise(SHAPE, seed=1), lambda step, total, denoised: None
    sampling.run_sampler(
        lambda x, sigma: x, noise, torch.zeros(SHAPE), sigmas, sampler_name="uni_pc", seed=1, progress=silent
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
    between = step_noise(x, seed=7)
    first, second = between(None, None), between(None, None)
    assert not torch.equal(first, sampling.draw_noise(SHAPE, seed=7)) and not torch.equal(first, second)
    step_noise(x, seed=2**64 - 1)


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
