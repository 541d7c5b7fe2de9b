"""Stock conditioning, mask, noise and scheduler nodes before our samplers, on a real ComfyUI."""

from __future__ import annotations

import numpy as np
import pytest

from tests.comfyui import ComfyUI
from tests.graphs import NEGATIVE, POSITIVE, SAMPLER, Prompt, picture
from tests.test_comfy_run import pixels

pytestmark = pytest.mark.comfy

STEPS = 4
FIRST = "20"


def node(kind: str, **inputs: object) -> dict:
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}


def in_stages() -> Prompt:
    """The picture's steps, dealt to two samplers."""
    prompt = picture()
    given = dict(prompt[SAMPLER]["inputs"])
    given["noise_seed"] = given.pop("seed")
    for name in ("denoise", "shift"):
        del given[name]
    first = given | {"end_at_step": 2, "return_with_leftover_noise": "enable"}
    second = given | {"add_noise": "disable", "start_at_step": 2, "latent_image": [FIRST, 0], "noise_seed": 99}
    prompt[FIRST], prompt[SAMPLER] = (node("OutriggerSamplerAdvanced", **inputs) for inputs in (first, second))
    return prompt


def test_leftover_noise_goes_from_one_sampler_to_the_next(comfyui: ComfyUI):
    runs = [comfyui.run(prompt) for prompt in (picture(), in_stages())]
    assert [run.end.kind for run in runs] == ["execution_success"] * 2, runs[1].end.data
    whole, staged = (pixels(run.images()[0]) for run in runs)
    assert np.abs(whole - staged).max() < 2.5 / 255
    assert [event.data["value"] for event in runs[1].of("progress", FIRST)] == [1, 2]


def test_stock_nodes_for_conditioning_masks_noise_and_sigmas_are_honoured(comfyui: ComfyUI):
    prompt = picture(SAMPLER={"sampler_name": "dpmpp_2m"})
    given = prompt[SAMPLER]["inputs"]
    prompt |= {
        "10": node("ConditioningSetArea", conditioning=[POSITIVE, 0], width=64, height=64, x=32, y=32, strength=0.8),
        "11": node("SolidMask", value=1.0, width=128, height=64),
        "12": node("ConditioningSetMask", conditioning=[POSITIVE, 0], mask=["11", 0], strength=0.5, set_cond_area="default"),
        "13": node("ConditioningSetTimestepRange", conditioning=[NEGATIVE, 0], start=0.0, end=0.6),
        "14": node("ConditioningCombine", conditioning_1=["10", 0], conditioning_2=["12", 0]),
        "15": node("ConditioningCombine", conditioning_1=["14", 0], conditioning_2=[POSITIVE, 0]),
        "16": node("ConditioningSetAreaPercentageVideo", conditioning=["13", 0], width=1.0, height=0.5, temporal=1.0,
                   x=0.0, y=0.5, z=0.0, strength=1.0),
        "17": node("SetLatentNoiseMask", samples=given["latent_image"], mask=["11", 0]),
        "18": node("KarrasScheduler", steps=STEPS, sigma_max=1.0, sigma_min=0.1, rho=7.0),
        "19": node("RandomNoise", noise_seed=3),
        SAMPLER: node("OutriggerSamplerAdvanced", model=given["model"], positive=["15", 0], negative=["16", 0],
                      latent_image=["17", 0], sigmas=["18", 0], noise=["19", 0], sampler_name="dpmpp_2m"),
    }  # fmt: skip
    run = comfyui.run(prompt)
    assert run.end.kind == "execution_success", run.end.data
    assert [event.data["value"] for event in run.of("progress", SAMPLER)] == list(range(1, STEPS + 1))
    assert np.ptp(pixels(run.images()[0])) > 0.1


def test_an_area_outside_the_latent_is_an_error_on_the_sampler_that_says_what_to_do(comfyui: ComfyUI):
    prompt = picture()
    prompt["10"] = node(
        "ConditioningSetArea", conditioning=[POSITIVE, 0], width=64, height=64, x=640, y=0, strength=1.0
    )
    prompt[SAMPLER]["inputs"]["positive"] = ["10", 0]
    run = comfyui.run(prompt)
    assert run.error["node_id"] == SAMPLER
    assert run.error["exception_message"].startswith(
        "the area of a conditioning begins at (0, 0, 80), outside the latent"
    )
