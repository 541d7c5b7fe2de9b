"""A plan uses all its devices, or is refused with one that does."""

from __future__ import annotations

import math
import random
import re
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from runtime.degrees import Degrees
from runtime.gain import saves_time
from runtime.inspection import ModelFacts, inspect_model
from runtime.lora.size import added_by
from runtime.machine import CudaDevice, Machine, visible
from runtime.needs import Needs
from runtime.plan import PlanRefused, make_plan, plan_model
from runtime.protocol import Conditioning, Sample
from runtime.sampling import fit_empty_latent, resize_empty_latent
from runtime.settings import AXES, LoraSettings, MemorySettings, ModelSettings, ParallelSettings, SampleSettings
from runtime.workload import MOST_JOINED, Call, Prompt, Workload
from tests.lora_files import Draw, kohya
from tests.published_keys import read_keys, write_file
from tests.timing import least

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
        ({}, with_gpus(2), 40, {"cfg": 2}, ("cuda:0", "cuda:1")),
        ({}, with_gpus(4), 40, {"cfg": 2, "ulysses": 2}, tuple(f"cuda:{n}" for n in range(4))),
        ({}, with_gpus(8), 12, {"ulysses": 4, "cfg": 2}, tuple(f"cuda:{n}" for n in range(8))),
        ({}, with_gpus(4), 2, {"ulysses": 2, "cfg": 2}, tuple(f"cuda:{n}" for n in range(4))),
        ({}, with_gpus(3), 2, {"ring": 3}, ("cuda:0", "cuda:1", "cuda:2")),
        ({}, with_gpus(8), 2, {"cfg": 2, "ring": 2, "ulysses": 2}, tuple(f"cuda:{n}" for n in range(8))),
        ({"devices": "cpu:2"}, NO_GPU, 2, {"cfg": 2}, ("cpu",) * 2),
        ({"devices": "cpu:3"}, NO_GPU, 2, {"ring": 3}, ("cpu",) * 3),
        ({"devices": "cpu:4", "cfg": 1, "ring": 1, "data": 1}, NO_GPU, 4, {"ulysses": 4}, ("cpu",) * 4),
        ({"devices": "cpu:4", "cfg": 1, "ring": 1, "ulysses": 1}, NO_GPU, 4, {"tensor": 4}, ("cpu",) * 4),
        ({"devices": "cpu:6", "data": 3, "tensor": 2}, NO_GPU, 4, {"data": 3, "tensor": 2}, ("cpu",) * 6),
        ({"devices": "cpu:2", "cfg": 2}, NO_GPU, 2, {"cfg": 2}, ("cpu",) * 2),
        ({"devices": "cpu:4"}, NO_GPU, 2, {"ulysses": 2, "cfg": 2}, ("cpu",) * 4),
        ({"devices": "cpu:3"}, NO_GPU, 4, {"ring": 3}, ("cpu",) * 3),
        ({"devices": "cpu:3", "ring": 1}, NO_GPU, 4, {"ulysses": 3}, ("cpu",) * 3),
        ({"devices": "cpu:6", "ulysses": 3}, NO_GPU, 4, {"cfg": 2, "ulysses": 3}, ("cpu",) * 6),
        ({"devices": "cpu:6", "ulysses": 3, "tensor": 2}, NO_GPU, 7, {"ulysses": 3, "tensor": 2}, ("cpu",) * 6),
        ({"devices": "cuda:1,0"}, with_gpus(2), 12, {"cfg": 2}, ("cuda:1", "cuda:0")),
        ({"ulysses": 2}, NO_GPU, 2, {"ulysses": 2}, ("cpu",) * 2),
        ({"ulysses": 2, "cfg": 2}, with_gpus(8), 2, {"ulysses": 2, "cfg": 2}, tuple(f"cuda:{n}" for n in range(4))),
    ],
)
def test_open_degrees_take_cfg_first_then_ulysses_then_the_ring(settings, machine, heads, degrees, devices):
    plan = make_plan(ParallelSettings(**settings), model_with(heads), machine)
    assert plan.degrees == {axis: degrees.get(axis, 1) for axis in AXES}
    assert plan.devices == devices
    assert plan.reason


@pytest.mark.parametrize(
    ("settings", "machine", "heads", "words"),
    [
        ({"devices": "cpu:3", "ulysses": 3}, NO_GPU, 2, ("3 ranks for 2 heads", "cpu:3", "ring 3")),
        ({"devices": "cpu:3", "ring": 1, "cfg": 1, "data": 1}, NO_GPU, 2, ("cpu:3", "3 devices", "2 heads")),
        ({"tensor": 4}, NO_GPU, 2, ("tensor 4", "4 ranks for 2 heads", "tensor 2")),
        ({"ulysses": 2, "tensor": 2}, NO_GPU, 2, ("ulysses 2 x tensor 2 = 4", "2 heads", "cfg 2, ring 1, ulysses 2")),
        ({"ulysses": 2, "ring": 64}, NO_GPU, 2, ("ulysses 2 = 128", "more than 64 ranks")),
        ({"devices": "cpu:70", "ring": 2}, NO_GPU, 2, ("cpu:70 is more than 64 ranks", "cpu:64")),
        ({"cfg": 4}, NO_GPU, 2, ("cfg 4", "set cfg to 1, 2 or 3", "cfg 2, ring 1, ulysses 2")),
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
@pytest.mark.parametrize("heads", [2, 12, 30])
def test_a_plan_uses_all_its_devices_or_the_nearest_is_accepted(gpus, heads):
    facts, machine = model_with(heads), with_gpus(gpus)
    generator, accepted, refused = random.Random(heads), 0, 0
    listed = [f"cuda:{','.join(map(str, range(count)))}" for count in range(1, 9)]
    devices = ["auto", *(f"cpu:{count}" for count in range(1, 9)), *listed]
    for _ in range(400):
        degrees = {axis: generator.choice((0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)) for axis in AXES}
        settings = ParallelSettings.model_construct(devices=generator.choice(devices), **degrees)
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
            assert heads >= plan.ulysses * plan.tensor and plan.cfg <= 3
            assert all(plan.degrees[axis] == degree for axis, degree in settings.set_degrees.items())
    assert accepted and refused


WIDTH, DEPTH = 40 * 128, (14 << 30) // (40 * 128)
LARGE = ModelFacts(
    name="large",
    family="wan",
    heads=40,
    head_dim=128,
    layers=40,
    config={},
    shapes={"blocks.0.attn1.to_q.weight": (WIDTH, DEPTH)},
)
SMALL_GPU = CudaDevice(name="GPU", memory_mib=24 << 10)
"""28 GiB of weights at 16 bit, and a GPU of 24 GiB."""


@pytest.mark.parametrize(
    ("gpus", "settings", "degrees"),
    [
        (2, {}, {"tensor": 2}),
        (3, {}, {"tensor": 3}),
        (4, {}, {"cfg": 2, "tensor": 2}),
        (8, {"devices": "cuda:0,1,2,3,4,5,6,7", "cfg": 1}, {"ulysses": 4, "tensor": 2}),
    ],
)
def test_weights_that_do_not_fit_are_cut(gpus, settings, degrees):
    machine = Machine(cuda=(SMALL_GPU,) * gpus)
    plan = make_plan(ParallelSettings(**settings), LARGE, machine)
    assert plan.degrees == {axis: degrees.get(axis, 1) for axis in AXES}
    most_heads = -(-LARGE.heads // plan.tensor)
    assert "28.0 GiB" in plan.reason and plan.bytes_per_rank == 2 * most_heads * LARGE.head_dim * DEPTH


def test_weights_that_only_a_cut_holds_are_cut_though_little_is_left_beside_them():
    """14 GiB of 16 on each of two."""
    machine = Machine(cuda=(CudaDevice("GPU", 16 << 10),) * 2)
    assert make_plan(ParallelSettings(), LARGE, machine).tensor == 2
    assert not Needs(LARGE, memory=16 << 30).fits(2)


@pytest.mark.parametrize(
    ("gib", "has_nccl", "devices", "degrees"),
    [
        ((80, 2), True, "cuda:0", {}),
        ((2, 80), True, "cuda:1", {}),
        ((24, 2, 24), True, "cuda:0,2", {"tensor": 2}),
        ((80, 80, 2, 80, 80), True, "cuda:0,1,3,4", {"cfg": 2, "ulysses": 2}),
        ((2, 80), False, "cuda:1", {}),
        ((16, 16, 2), True, "cuda:0,1", {"tensor": 2}),
    ],
)
def test_a_gpu_that_is_too_small_beside_larger_ones_is_left_out(gib, has_nccl, devices, degrees):
    machine = Machine(cuda=tuple(CudaDevice("GPU", size << 10) for size in gib), has_nccl=has_nccl)
    plan = make_plan(ParallelSettings(), LARGE, machine)
    assert f"cuda:{','.join(device.removeprefix('cuda:') for device in plan.devices)}" == devices
    assert plan.degrees == {axis: degrees.get(axis, 1) for axis in AXES}
    assert ("the weights do not fit" if has_nccl else "NCCL") in plan.reason
    named = ParallelSettings(devices=devices, **plan.degrees)
    assert make_plan(named, LARGE, machine).bytes_per_rank == plan.bytes_per_rank


def test_where_all_gpus_are_too_small_the_refusal_is_about_all_of_them():
    with pytest.raises(PlanRefused, match="cuda:0, cuda:1 have 4"):
        make_plan(ParallelSettings(), LARGE, Machine(cuda=(CudaDevice("GPU", 4 << 10),) * 2))


def test_a_plan_says_so_where_one_device_would_be_faster():
    assert "one GPU may be faster" in make_plan(ParallelSettings(), inspect_model("random:wan"), with_gpus(2)).reason
    assert "faster" not in make_plan(ParallelSettings(), LARGE, with_gpus(2)).reason
    assert "as fast" in make_plan(ParallelSettings(), LARGE, NO_GPU).reason
    assert "as fast" in make_plan(ParallelSettings(devices="cpu:2"), LARGE, NO_GPU).reason


@pytest.mark.parametrize(("degrees", "told"), [({"tensor": 2}, True), ({"ring": 2}, False), ({"ulysses": 2}, False)])
def test_a_reason_tells_of_a_gathering_without_effect(degrees, told):
    gather = MemorySettings(offload="layerwise", fetch="gather")
    plan = make_plan(ParallelSettings(devices="cpu:2", **degrees), LARGE, NO_GPU, offload=gather)
    assert ("fetch gather has no effect" in plan.reason) == told


def flux_of(width: int) -> ModelFacts:
    """What Flux.1 is with heads of 64 and blocks of this width."""
    shapes = {f"single_transformer_blocks.{block}.proj_out.weight": (width, 12 * width) for block in range(12)}
    return replace(inspect_model("random:flux"), heads=width // 64, head_dim=64, shapes=shapes)


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}, {"tensor": 2}], ids=str)
def test_whether_one_device_is_faster_depends_on_width_and_tokens(degrees):
    small, large = Workload((1, 16, 64, 64), branches=1), Workload((1, 16, 256, 256), branches=1)
    assert not saves_time(flux_of(768), Degrees(**degrees), tokens=small.tokens((2, 2)))
    assert saves_time(flux_of(3072), Degrees(**degrees), tokens=large.tokens((2, 2)))
    settings, machine = ParallelSettings(**degrees), with_gpus(2)
    assert "one GPU may be faster" in make_plan(settings, flux_of(768), machine, workload=small).reason
    assert "faster" not in make_plan(settings, flux_of(3072), machine, workload=large).reason


def test_weights_that_cannot_be_held_are_refused_with_a_plan_that_can_hold_them():
    machine = Machine(cuda=(SMALL_GPU,) * 8)
    with pytest.raises(PlanRefused, match=r"28\.0 GiB on each rank at tensor 1, but cuda:0 has 24\.0 GiB") as refusal:
        make_plan(ParallelSettings(devices="cuda:0"), LARGE, machine)
    assert make_plan(refusal.value.nearest, LARGE, machine).tensor == 2


@pytest.mark.parametrize(
    ("degrees", "workload", "words"),
    [
        ({"cfg": 3}, {"branches": 2}, ("cfg 3 computes 3 prompts", "evaluates 2", "ring 3")),
        ({"data": 4}, {"batch": 3}, ("data 4", "this latent has 3", "data 2, cfg 2")),
        ({"ring": 7, "ulysses": 2}, {}, ("ring 7 x ulysses 2: 14 ranks", "has 12", "cfg 2, ring 7")),
        ({"cfg": 2, "ring": 7}, {"branches": 1}, ("cfg 2 x ring 7: 14 ranks", "has 12", "tensor 2")),
    ],
)
def test_degrees_that_leave_ranks_idle_in_a_request_are_refused_with_some_that_do_not(degrees, workload, words):
    asked = Workload(latent=(workload.pop("batch", 1), 16, 1, 6, 8), **{"branches": 2, **workload})
    with pytest.raises(PlanRefused) as refusal:
        make_plan(ParallelSettings(**degrees), model_with(2), NO_GPU, workload=asked)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    nearest = make_plan(refusal.value.nearest, model_with(2), NO_GPU, workload=asked)
    assert nearest.world == len(nearest.devices)


@pytest.mark.parametrize(
    ("degrees", "workload"),
    [
        ({"cfg": 3}, {"branches": 3}),
        ({"cfg": 3}, {"branches": 1}),
        ({"cfg": 2}, {"branches": 3}),
        ({"data": 2}, {"batch": 3}),
    ],
)
def test_degrees_that_a_request_uses_are_taken(degrees, workload):
    asked = Workload(latent=(workload.pop("batch", 1), 16, 1, 6, 8), **workload)
    plan = make_plan(ParallelSettings(**degrees), model_with(2), NO_GPU, workload=asked)
    assert plan.degrees == {**dict.fromkeys(AXES, 1), **degrees}


def test_what_a_load_would_refuse_is_refused_by_the_plan(tmp_path):
    weights = tmp_path / "model.safetensors"
    write_tiny_file(weights)
    for fields, words in (
        ({"model": "random:wan", "memory": MemorySettings(offload="disk")}, "random weights"),
        ({"memory": MemorySettings(offload="disk"), "quant": "svdquant-int4"}, "converted when it is loaded"),
        ({"vae": str(tmp_path / "none.safetensors")}, "no such VAE"),
        ({"text_encoder": str(weights) + "x"}, "no such text encoder. Choose umt5_xxl files or"),
        ({"text_encoder_2": str(weights)}, "text_encoder_2 is set"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_model(ModelSettings(**{"model": str(weights), **fields}), NO_GPU)
    assert plan_model(ModelSettings(model=str(weights), memory=MemorySettings(offload="disk")), NO_GPU).world == 1


def write_tiny_file(path):
    """A file with the names and shapes of the tiny Wan, and zeros."""
    shapes = inspect_model("random:wan").shapes
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, path)


def test_a_request_has_the_workload_of_its_parts():
    def prompt(tokens):
        return Conditioning(embedding=torch.zeros(1, tokens, 8))

    def request(**fields):
        return Sample(
            job="a",
            model=ModelSettings(model="random:wan"),
            latent=torch.zeros(3, 16, 9, 15, 6),
            positive=(prompt(5), prompt(9)),
            downscale=(8, None),
            **fields,
        )

    both = Workload.of(request(settings=SampleSettings(), negative=(prompt(7),)))
    prompts = ((Prompt(5), Prompt(9)), (Prompt(7),))
    assert both == Workload(latent=(3, 16, 9, 15, 6), text=9, branches=2, downscale=(8, None), prompts=prompts)
    assert (both.batch, both.tokens((1, 2, 2))) == (3, 9 * 8 * 3)
    assert Workload.of(request(settings=SampleSettings(cfg=1.0), negative=(prompt(7),))).branches == 1
    three = request(settings=SampleSettings(cfg_middle=2.0), negative=(prompt(7),), middle=(prompt(30),))
    assert (Workload.of(three).branches, Workload.of(three).text) == (3, 30)


def test_entries_of_one_length_and_size_go_through_the_model_together_where_they_are_used_at_once():
    half, outside, never = (40, 24, 0, 0), (40, 24, 90, 0), {"start": 0.5, "end": 0.2}
    branches = ((Prompt(5), Prompt(9), Prompt(9, half)), (Prompt(9), Prompt(5, **never)))
    load, whole = Workload((1, 16, 40, 48), text=9, branches=2, prompts=branches), (40, 48)
    alone, (first, second) = load.shares(1)[0], load.shares(2)
    pixels, part = 40 * 48, 40 * 24
    apart = [Call(1, 2 * pixels + part, 5, whole), Call(1, 3 * pixels, 9, (40, 24)), Call(2, pixels + part, 9, whole)]
    assert load.calls(alone) == apart
    assert load.calls(alone, fill=16) == [Call(1, 3 * pixels, 16, (40, 24)), Call(3, part, 16, whole)]
    assert load.calls(first) == [
        Call(1, pixels + part, 5, whole),
        Call(1, pixels + part, 9, whole),
        Call(1, 2 * pixels, 9, (40, 24)),
    ]
    assert load.calls(second) == [Call(1, 0, 9, whole)]
    assert load.calls([Prompt(5, **never)]) == [] and load.calls([Prompt(5, outside)]) == [Call(1, 0, 5, whole)]
    assert load.calls([Prompt(5)] * 9) == [Call(MOST_JOINED, (9 - MOST_JOINED) * pixels, 5, whole)]
    ending, beginning = {"end": 0.5}, {"start": 0.5}
    assert load.calls([Prompt(5), Prompt(5, **ending), Prompt(5, **beginning)]) == [
        Call(1, 2 * pixels, 5, whole),
        Call(2, 0, 5, whole),
        Call(2, pixels, 5, whole),
    ]


@pytest.mark.parametrize(
    ("family", "made", "downscale", "sampled"),
    [
        ("qwen", (2, 16, 12, 8), (None, None), (2, 16, 1, 12, 8)),
        ("wan", (1, 4, 12, 8), (8, None), (1, 16, 1, 12, 8)),
        ("wan2.2-ti2v", (1, 16, 5, 12, 8), (8, 4), (1, 48, 5, 6, 4)),
        ("flux2", (1, 4, 12, 8), (8, None), (1, 128, 6, 4)),
        ("ltx", (1, 16, 5, 12, 8), (8, 4), (1, 128, 2, 3, 2)),
    ],
)
def test_an_empty_latent_of_another_family_is_planned_in_the_shape_that_it_is_sampled_in(
    family, made, downscale, sampled
):
    """As the pipeline makes it of the same latent."""
    facts, load = inspect_model(f"random:{family}"), Workload(made, downscale=downscale)
    form = facts.spec.latent
    spatial, temporal = (
        (other or own) / own for other, own in zip(downscale, (form.spatial, form.temporal), strict=True)
    )
    latent = fit_empty_latent(torch.zeros(made), channels=form.channels, dims=form.dims)
    assert tuple(resize_empty_latent(latent, spatial=spatial, temporal=temporal).shape) == sampled
    as_it_is, other = (
        make_plan(ParallelSettings(), facts, with_gpus(1), workload=each) for each in (Workload(sampled), load)
    )
    assert as_it_is.activation_bytes == other.activation_bytes > 0


def test_what_a_step_works_with_counts_against_the_memory():
    """28 GiB of weights fit on 32 GiB, but not beside a long video: over two devices both do."""
    machine, video = Machine(cuda=(CudaDevice("GPU", 32 << 10),) * 8), Workload((1, 16, 21, 90, 160), 512, branches=2)
    facts = replace(inspect_model("random:wan"), shapes=LARGE.shapes, heads=40, head_dim=128)
    settings = ParallelSettings(devices="cuda:0")
    assert make_plan(settings, facts, machine).peak_bytes == 0
    with pytest.raises(PlanRefused, match=r"28\.0 GiB on each rank at tensor 1 and a step [\d.]+ GiB more") as refusal:
        make_plan(settings, facts, machine, workload=video)
    nearest = make_plan(refusal.value.nearest, facts, machine, workload=video)
    assert nearest.world > 1 and nearest.activation_bytes > 0
    assert nearest.peak_bytes == nearest.bytes_per_rank + nearest.activation_bytes <= 32 << 30


def test_loras_count_beside_the_weights_and_choose_no_other_degrees(tmp_path):
    layers = {"blocks.0.attn1.to_q": (128, 128), "blocks.1.attn1.to_q": (128, 128)}
    save_file(kohya(layers, Draw(1), alpha=False), tmp_path / "s.safetensors")
    save_file({"lora_te1_x.lora_down.weight": torch.zeros(8, 8)}, tmp_path / "text.safetensors")
    (tmp_path / "broken.safetensors").write_text("no")

    def bytes_with(*loras):
        model = ModelSettings(model="random:wan", dtype="bf16", loras=loras)
        return plan_model(model, NO_GPU).bytes_per_rank

    lora = LoraSettings(path=str(tmp_path / "s.safetensors"))
    numbers = 2 * 4 * (128 + 128)
    assert bytes_with(lora) - bytes_with() == 2 * 2 * numbers, (
        "once as they were read, once as they are multiplied with"
    )
    others = [{"path": str(tmp_path / f"{name}.safetensors")} for name in ("text", "broken", "none")]
    for free in ({"strength": 0.0}, *others):
        assert bytes_with(lora.model_copy(update=free)) == bytes_with()
    facts = inspect_model("random:wan")
    needs = Needs(facts, memory=int(bytes_with() / 0.8) + 8)
    [added] = added_by([lora], facts)
    assert needs.fits(1) and replace(needs, added=(added,)).fits(1)
    assert replace(needs, added=(added * 1000,)).lack(Degrees())


def test_a_model_that_fits_nowhere_has_no_nearest_plan():
    with pytest.raises(PlanRefused, match="No plan on this machine works") as refusal:
        make_plan(ParallelSettings(), LARGE, Machine(cuda=(SMALL_GPU,)), dtype="fp32")
    assert refusal.value.nearest is None and "56.0 GiB" in str(refusal.value)


def test_a_model_that_fits_with_offload_says_so():
    blocks = {f"blocks.{number}.{name}": shape for number in range(8) for name, shape in LARGE.shapes.items()}
    many = replace(LARGE, shapes=blocks, layers=8)
    machine = Machine(cuda=(CudaDevice("GPU", 160 << 10),))
    with pytest.raises(
        PlanRefused, match=r"has 160\.0 GiB\. The nearest that fits: offload layerwise \(Configure Memory\)"
    ):
        make_plan(ParallelSettings(), many, machine)
    offload = MemorySettings(offload="layerwise")
    assert make_plan(ParallelSettings(), many, machine, offload=offload).devices == ("cuda:0",)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"resident_blocks": "8"}, r"fits: resident_blocks auto \(Configure Memory\)"),
        ({"prefetch": "1.0"}, r"fits: prefetch 1 \(Configure Memory\)"),
        ({"prefetch": "1.0", "resident_blocks": "8"}, r"fits: resident_blocks auto and prefetch 1 \(Conf"),
    ],
)
def test_of_weights_that_stream_already_the_setting_that_is_too_large_is_named(asked, says):
    """And with it as it says there is a plan."""
    blocks = {f"blocks.{number}.{name}": shape for number in range(8) for name, shape in LARGE.shapes.items()}
    many = replace(LARGE, shapes=blocks, layers=8)
    machine = Machine(cuda=(CudaDevice("GPU", 160 << 10),))
    offload = MemorySettings(offload="layerwise", **asked)
    with pytest.raises(PlanRefused, match=says):
        make_plan(ParallelSettings(), many, machine, offload=offload)
    named = dict(re.findall(r"(resident_blocks|prefetch) (auto|1)", says))
    fitting = offload.model_copy(update=named)
    assert make_plan(ParallelSettings(), many, machine, offload=fitting).devices == ("cuda:0",)


def test_to_find_that_nothing_fits_takes_under_a_second(tmp_path):
    """Of a model of published size on eight small GPUs, the largest of them last, so that every order is tried."""
    path = write_file(tmp_path / "model.safetensors", read_keys("original")["Wan 2.1 T2V 14B"])
    machine = Machine(cuda=(CudaDevice("GPU", 200),) * 7 + (CudaDevice("GPU", 201),))
    load = Workload((1, 16, 21, 90, 160), text=512, branches=2)

    def seconds() -> float:
        started = time.process_time()
        with pytest.raises(PlanRefused, match="No plan on this machine works"):
            plan_model(ModelSettings(model=path), machine, workload=load)
        return time.process_time() - started

    assert least(seconds, enough=1.0) < 1.0


def test_the_largest_gpu_alone_is_a_nearest_plan_where_the_first_is_too_small():
    mixed = Machine(cuda=(SMALL_GPU, CudaDevice("large", 80 << 10)))
    with pytest.raises(PlanRefused, match="cuda:0, cuda:1 have 24") as refusal:
        make_plan(ParallelSettings(ring=2), LARGE, mixed, dtype="fp32")
    assert make_plan(refusal.value.nearest, LARGE, mixed, dtype="fp32").devices == ("cuda:1",)


def test_open_degrees_that_the_request_limits_are_refused_with_its_numbers():
    """One token: a ring of 7 would have nothing to do."""
    load = Workload((1, 16, 1, 2, 2), branches=2)
    with pytest.raises(
        PlanRefused, match=r"no degree set, and .* 2 heads, ring x ulysses at most 1 tokens, data at most a"
    ):
        make_plan(ParallelSettings(devices="cpu:7"), model_with(2), NO_GPU, workload=load)


def test_the_tiny_model_has_a_plan_for_each_of_its_heads():
    facts = inspect_model("random:wan")
    assert make_plan(ParallelSettings(devices="cpu:8"), facts, NO_GPU).degrees["ulysses"] == 4


LISTING = "0, GPU-aa11, 81559, Disabled, NVIDIA H100\n1, GPU-bb22, 24564, [N/A], NVIDIA GeForce RTX 4090\n"
DIVIDED = LISTING.replace("Disabled", "Enabled").replace("[N/A]", "Enabled")


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
        ("0,0", []),
        ("0,GPU-aa", []),
        ("MIG-1234", ["MIG instance"]),
        ("MIG-1234,MIG-5678", ["MIG instance"]),
    ],
)
def test_gpus_are_the_ones_cuda_would_show(chosen, names):
    assert [device.name for device in visible(LISTING, chosen)[0]] == names


@pytest.mark.parametrize("chosen", [None, "0,1"])
def test_of_divided_gpus_there_is_one_instance(chosen):
    [instance], why = visible(DIVIDED, chosen)
    assert (instance.name, instance.memory_mib) == ("MIG instance", 0) and "MIG" in why


def test_no_listing_is_no_gpu():
    assert visible("", None) == ((), "")


@pytest.mark.parametrize("settings", [{"devices": "cuda:0,1"}, {"ulysses": 2}])
def test_gpus_that_cannot_talk_to_each_other_are_refused(settings):
    machine = Machine(cuda=(GPU,) * 2, has_nccl=False)
    with pytest.raises(PlanRefused, match=r"2 GPUs talk to each other through NCCL, .* Linux") as refusal:
        make_plan(ParallelSettings(**settings), model_with(4), machine)
    assert make_plan(refusal.value.nearest, model_with(4), machine).devices == ("cuda:0",)
    alone = make_plan(ParallelSettings(), model_with(4), machine)
    assert alone.devices == ("cuda:0",) and "1 GPU of 2" in alone.reason


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("0,0", r"no GPUs \(CUDA_VISIBLE_DEVICES 0,0 names a GPU twice"),
        ("MIG-1,MIG-2", r"1 GPU \(of GPUs that MIG divides"),
        ("", r"no GPUs \(CUDA_VISIBLE_DEVICES is set to nothing, which hides every GPU; nvidia-smi lists 0, 1\)"),
        ("2", r"no GPUs \(CUDA_VISIBLE_DEVICES names 2, which is no GPU here; nvidia-smi lists 0, 1\)"),
        ("0,7,1", r"1 GPU \(CUDA_VISIBLE_DEVICES names 7, which is no GPU here, and hides what follows; nvidia-smi"),
        ("1", r"1 GPU \(CUDA_VISIBLE_DEVICES 1 leaves 1 of 2\)"),
    ],
)
def test_gpus_that_are_not_there_are_refused_with_what_hides_them(chosen, words):
    gpus, why = visible(LISTING, chosen)
    with pytest.raises(PlanRefused, match=f"cuda:1 .* not there: this machine has {words}"):
        make_plan(ParallelSettings(devices="cuda:0,1"), model_with(4), Machine(cuda=gpus, why=why))


def test_a_plan_says_what_hides_every_gpu():
    gpus, why = visible(LISTING, "")
    machine = Machine(cuda=gpus, why=why)
    assert "CUDA_VISIBLE_DEVICES is set to nothing" in make_plan(ParallelSettings(), model_with(4), machine).reason


def test_what_does_not_fit_is_planned_with_offload():
    """Two slots of the largest block, and what is in no block."""
    facts, machine = inspect_model("random:wan"), Machine(cuda=(CudaDevice("small", 2),))
    with pytest.raises(PlanRefused, match="weights of random:wan take"):
        make_plan(ParallelSettings(), facts, machine, dtype="fp32")
    offload = MemorySettings(offload="layerwise", prefetch="0", resident_blocks="0")
    machine = Machine(cuda=(GPU,))
    whole = make_plan(ParallelSettings(), facts, machine, dtype="fp32").bytes_per_rank
    small = make_plan(ParallelSettings(), facts, machine, dtype="fp32", offload=offload).bytes_per_rank
    shapes = [shape for name, shape in facts.shapes.items() if re.fullmatch(r"blocks\.0\..*weight", name)]
    matrices = sum(4 * math.prod(shape) for shape in shapes if len(shape) == 2)
    assert whole - small == (facts.layers - 1) * matrices


def test_heads_that_share_keys_are_not_parted():
    facts = inspect_model("random:lumina2")
    assert Needs(facts).problem({"tensor": 4, "ulysses": 3}) == ""
    assert (
        Needs(facts).problem({"tensor": 6}) == "tensor 6 is more than the 4 heads of keys and values of random:lumina2"
    )
