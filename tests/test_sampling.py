"""Samplers, schedules and noise by themselves: what must hold whatever ComfyUI does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torchsde

from runtime import sampling
from runtime.protocol import Conditioning, Sample
from runtime.sample_inputs import noise_of, sigmas_of
from runtime.sampling.brownian import BrownianMotion
from runtime.sampling.latents import scale_noise, unscale_noise
from runtime.sampling.noise import brownian_noise, step_noise
from runtime.settings import SAMPLER_NAMES, SCHEDULER_NAMES, ModelSettings, SampleSettings

TABLE = sampling.FlowTable(shift=3.0)
SHAPE = (2, 16, 1, 4, 6)


def test_tables_hold_what_the_settings_offer_in_that_order():
    assert tuple(sampling.SAMPLERS) == SAMPLER_NAMES
    assert tuple(sampling.SCHEDULERS) == SCHEDULER_NAMES


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


def test_kl_optimal_refuses_one_step():
    with pytest.raises(ValueError, match=r"kl_optimal.*2 steps or more"):
        sampling.make_sigmas("kl_optimal", 1, table=TABLE, sampler_name="euler")


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


def request_for(latent: torch.Tensor, **tensors: torch.Tensor | None) -> Sample:
    """A request to sample with seed 7."""
    return Sample(
        job="numbers",
        model=ModelSettings(model="tiny-shapes"),
        settings=SampleSettings(seed=7),
        positive=(Conditioning(embedding=torch.zeros(1, 1, 1)),),
        latent=latent,
        **tensors,
    )


def starting_noise(latent: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """What a request with this latent starts from, in a model that samples in `SHAPE`."""
    return noise_of(request_for(latent, noise=noise), torch.zeros(SHAPE))


def test_noise_for_a_latent_in_half_precision_is_rounded_to_it():
    exact = sampling.draw_noise(SHAPE, seed=7)
    assert torch.equal(starting_noise(torch.zeros(SHAPE)), exact)
    assert torch.equal(starting_noise(torch.zeros(SHAPE, dtype=torch.float16)), exact.half().float())


@pytest.mark.parametrize("shape", [(2, 4, 4, 6), (2, 4, 1, 4, 6), (2, 16, 2, 3)])
def test_noise_of_a_seed_for_an_empty_latent_of_another_model_is_drawn_for_this_one(shape):
    latent = torch.zeros(shape)
    assert torch.equal(starting_noise(latent, sampling.draw_noise(shape, seed=7)), sampling.draw_noise(SHAPE, seed=7))
    assert not starting_noise(latent, latent).any()
    with pytest.raises(ValueError, match="the noise has shape"):
        starting_noise(latent, sampling.draw_noise(shape, seed=8))


def test_a_single_sigma_noises_the_latent_and_takes_no_step():
    noise, latent = torch.randn(SHAPE), torch.randn(SHAPE)
    sigmas = sigmas_of(request_for(latent, sigmas=torch.tensor([0.6])), TABLE)
    common = {"table": TABLE, "sampler_name": "uni_pc", "seed": 7, "progress": None}
    x = sampling.run_sampler(None, noise, latent, sigmas, **common)
    assert torch.allclose(x, (0.6 * noise + 0.4 * latent) / 0.4, atol=1e-5)
    with pytest.raises(ValueError, match="sigmas holds only 1, all noise"):
        sigmas_of(request_for(latent, sigmas=torch.tensor([1.0])), TABLE)


def test_noise_between_steps_differs_from_the_starting_noise():
    x = torch.zeros(SHAPE)
    between = step_noise(x, torch.tensor([1.0, 0.0]), highest=1.0, seed=7)
    first, second = between(None, None), between(None, None)
    assert not torch.equal(first, sampling.draw_noise(SHAPE, seed=7)) and not torch.equal(first, second)
    step_noise(x, torch.tensor([1.0, 0.0]), highest=1.0, seed=2**64 - 1)


def test_brownian_noise_is_one_motion_for_every_number_of_steps():
    sigmas = torch.tensor([1.0, 0.7, 0.4, 0.1, 0.0])
    between = brownian_noise(torch.zeros(SHAPE), sigmas, highest=1.0, seed=7)
    high, middle, low = sigmas[1:4]
    whole = between(high, low) * (high - low) ** 0.5
    parts = between(high, middle) * (high - middle) ** 0.5 + between(middle, low) * (middle - low) ** 0.5
    assert torch.allclose(whole, parts, atol=1e-5) and float(between(high, low).std()) == pytest.approx(1, abs=0.1)
    where_x_is = brownian_noise(torch.zeros(SHAPE), sigmas, highest=1.0, seed=7, on_cpu=False)
    assert torch.equal(between(high, low), where_x_is(high, low))


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**64 - 1])
def test_brownian_motion_is_torchsdes_to_the_bit(seed):
    like, grid = torch.zeros(2, 3, 5), torch.rand(40, generator=torch.Generator().manual_seed(seed % 97)).tolist()
    for lowest, highest in ((0.003, 1.0), (0.0301234567, 0.99940001), (1e-6, 0.4)):
        theirs = torchsde.BrownianTree(lowest, like, highest, entropy=seed)
        ours = BrownianMotion(lowest, highest, like=like, seed=seed)
        places = [lowest, highest, *(lowest + part * (highest - lowest) for part in grid)]
        ends = [*pairwise(sorted(places, reverse=True)), *pairwise(places), (highest, lowest)]
        for one, other in ends:
            low, high = (min(max(at, round(lowest, 6)), round(highest, 6)) for at in sorted((one, other)))
            assert torch.equal(ours.increment(low, high), theirs(low, high)), (lowest, highest, low, high)


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
