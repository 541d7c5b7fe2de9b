"""A plan uses all its devices, or is refused with one that does."""

from __future__ import annotations

from itertools import product

import pytest

from runtime.inspection import ModelFacts, inspect_model
from runtime.machine import CudaDevice, Machine, visible
from runtime.plan import PlanRefused, make_plan
from runtime.settings import AXES, ParallelSettings

GPU = CudaDevice(name="GPU", memory_mib=81920)
NO_GPU = Machine(cores=8)


def model_with(heads: int) -> ModelFacts:
    return ModelFacts(name="model", family="wan", heads=heads, head_dim=128, layers=2, config={})


def with_gpus(count: int) -> Machine:
    return Machine(cuda=(GPU,) * count, cores=8)


@pytest.mark.parametrize(
    ("settings", "machine", "heads", "degrees", "devices"),
    [
        ({}, NO_GPU, 40, {}, ("cpu",)),
        ({}, with_gpus(1), 40, {}, ("cuda:0",)),
        ({}, with_gpus(4), 40, {"ulysses": 4}, tuple(f"cuda:{n}" for n in range(4))),
        ({}, with_gpus(8), 12, {"ulysses": 4, "cfg": 2}, tuple(f"cuda:{n}" for n in range(8))),
        ({}, with_gpus(4), 2, {"ulysses": 2, "cfg": 2}, tuple(f"cuda:{n}" for n in range(4))),
        ({}, with_gpus(3), 2, {"ulysses": 2}, ("cuda:0", "cuda:1")),
        ({"devices": "cpu:2"}, NO_GPU, 2, {"ulysses": 2}, ("cpu",) * 2),
        ({"devices": "cpu:2", "cfg": 2}, NO_GPU, 2, {"cfg": 2}, ("cpu",) * 2),
        ({"devices": "cpu:4"}, NO_GPU, 2, {"ulysses": 2, "cfg": 2}, ("cpu",) * 4),
        ({"devices": "cuda:1,0"}, with_gpus(2), 12, {"ulysses": 2}, ("cuda:1", "cuda:0")),
        ({"ulysses": 2}, NO_GPU, 2, {"ulysses": 2}, ("cpu",) * 2),
        ({"ulysses": 2, "cfg": 2}, with_gpus(8), 2, {"ulysses": 2, "cfg": 2}, tuple(f"cuda:{n}" for n in range(4))),
    ],
)
def test_open_degrees_take_ulysses_first_then_cfg(settings, machine, heads, degrees, devices):
    plan = make_plan(ParallelSettings(**settings), model_with(heads), machine)
    assert plan.degrees == {axis: degrees.get(axis, 1) for axis in AXES}
    assert plan.devices == devices
    assert plan.reason


@pytest.mark.parametrize(
    ("settings", "machine", "heads", "words"),
    [
        ({"devices": "cpu:3", "ulysses": 3}, NO_GPU, 2, ("3 ranks for 2 heads", "ulysses 2")),
        ({"devices": "cpu:3"}, NO_GPU, 2, ("cpu:3", "3 devices", "2 heads")),
        ({"ring": 2}, NO_GPU, 2, ("ring 2", "not available in this version", "set ring to 1")),
        ({"tensor": 4}, NO_GPU, 2, ("tensor 4", "set tensor to 1")),
        ({"data": 2}, NO_GPU, 2, ("data 2", "set data to 1")),
        ({"cfg": 3}, NO_GPU, 2, ("cfg 3", "set cfg to 1 or 2")),
        ({"cfg": 2}, with_gpus(1), 2, ("cfg 2 = 2 needs 2 GPUs", "1 GPU")),
        ({"devices": "cuda:0"}, NO_GPU, 2, ("cuda:0", "no GPU", "cpu:1")),
        ({"devices": "cuda:0,5"}, with_gpus(2), 2, ("cuda:5 is not there", "2 GPUs")),
    ],
)
def test_refusals_name_the_values_and_the_way_out(settings, machine, heads, words):
    with pytest.raises(PlanRefused) as refusal:
        make_plan(ParallelSettings(**settings), model_with(heads), machine)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize("heads", [2, 12, 40])
def test_a_plan_uses_all_its_devices_or_the_nearest_is_accepted(gpus, heads):
    facts, machine = model_with(heads), with_gpus(gpus)
    listed = [f"cuda:{','.join(map(str, range(count)))}" for count in range(1, 9)]
    devices = ["auto", *(f"cpu:{count}" for count in range(1, 9)), *listed]
    accepted = refused = 0
    for chosen, ulysses, cfg, ring in product(devices, range(9), range(4), (0, 1, 2)):
        settings = ParallelSettings.model_construct(
            devices=chosen, ulysses=ulysses, cfg=cfg, ring=ring, tensor=0, data=0
        )
        try:
            plan = make_plan(settings, facts, machine)
        except PlanRefused as refusal:
            refused += 1
            nearest = make_plan(refusal.nearest, facts, machine)
            assert nearest.world == len(nearest.devices)
            assert all(f"{axis} {degree}" in str(refusal) for axis, degree in nearest.degrees.items()), str(refusal)
        else:
            accepted += 1
            assert plan.world == len(plan.devices)
            assert all(plan.degrees[axis] == degree for axis, degree in settings.set_degrees.items())
    assert accepted and refused


def test_the_tiny_model_has_a_plan_for_each_of_its_heads():
    facts = inspect_model("random:wan")
    assert make_plan(ParallelSettings(devices="cpu:8"), facts, NO_GPU).degrees["ulysses"] == 4


LISTING = "0, GPU-aa11, 81559, NVIDIA H100\n1, GPU-bb22, 24564, NVIDIA GeForce RTX 4090\n"


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["NVIDIA H100", "NVIDIA GeForce RTX 4090"]),
        ("", []),
        ("-1", []),
        ("1", ["NVIDIA GeForce RTX 4090"]),
        ("1,0", ["NVIDIA GeForce RTX 4090", "NVIDIA H100"]),
        ("0,7,1", ["NVIDIA H100"]),
        ("GPU-bb", ["NVIDIA GeForce RTX 4090"]),
        ("MIG-1234", ["MIG instance"]),
    ],
)
def test_gpus_are_the_ones_cuda_would_show(chosen, names):
    assert [device.name for device in visible(LISTING, chosen)] == names


def test_no_listing_is_no_gpu():
    assert visible("", None) == ()
