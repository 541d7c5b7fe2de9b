"""The figures of a comparison are what they are called."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.comparison import MOST_DECIBELS, Comparison
from runtime.machine import CudaDevice, Machine
from runtime.plan import plan_model
from runtime.settings import AXES, ModelSettings, ParallelSettings


def test_figures_of_a_known_difference():
    reference = torch.tensor([0.0, 3.0, 4.0, 0.0])
    found = Comparison.of(reference + torch.tensor([0.3, 0.0, 0.0, -0.4]), reference, tolerance=0.1)
    assert found.max_abs == pytest.approx(0.4)
    assert found.rel_err == pytest.approx(0.5 / 5.0)
    assert found.psnr_db == pytest.approx(20 * math.log10(4.0 / 0.25))
    assert found.ok is (found.rel_err <= 0.1)


def test_no_difference_is_finite_and_a_small_one_is_over_a_smaller_tolerance():
    reference = torch.randn(4, 4)
    same = Comparison.of(reference.clone(), reference, tolerance=0.0)
    assert same.ok and (same.max_abs, same.rel_err, same.psnr_db) == (0.0, 0.0, MOST_DECIBELS)
    assert not Comparison.of(reference * 1.001, reference, tolerance=1e-4).ok
    assert "NOT the same" in str(Comparison.of(reference * 1.001, reference, tolerance=1e-4))


@pytest.mark.parametrize("broken", ["result", "reference"])
def test_what_is_not_a_number_is_not_the_same(broken):
    pair = {"result": torch.ones(3), "reference": torch.ones(3)}
    pair[broken] = torch.tensor([1.0, float("nan"), 1.0])
    found = Comparison.of(**pair, tolerance=1.0)
    assert not found.ok and "NOT the same" in str(found)


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [({}, 1e-5), ({"dtype": "fp16"}, 1e-2), ({"dtype": "bf16"}, 5e-2), ({"quant": "svdquant-int4"}, 0.2)],
)
def test_the_tolerance_of_a_plan_is_that_of_its_numbers(fields, tolerance):
    settings = {"model": "random:wan", "parallel": ParallelSettings(devices="cpu:2")}
    assert plan_model(ModelSettings(**settings, **fields), Machine()).tolerance == tolerance
    gpus = Machine(cuda=(CudaDevice("GPU", 1 << 16),) * 2)
    assert plan_model(ModelSettings(model="random:wan"), gpus).tolerance == 5e-2


@pytest.mark.parametrize(("devices", "first"), [("auto", "auto"), ("cpu:4", "cpu:1"), ("cuda:2,0", "cuda:2")])
def test_one_rank_is_on_the_first_of_the_devices(devices, first):
    one = ParallelSettings(devices=devices).one_rank
    assert one.devices == first and one.set_degrees == dict.fromkeys(AXES, 1)
