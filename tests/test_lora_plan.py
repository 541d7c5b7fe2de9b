"""What a plan says of LoRAs is what they take: beside the weights, in host memory, and in each call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from runtime.degrees import Degrees
from runtime.families import FAMILIES
from runtime.forks import process_bytes
from runtime.host_memory import HostMemory
from runtime.inspection import inspect_model
from runtime.machine import CudaDevice, Machine
from runtime.plan import PlanRefused, plan_model
from runtime.settings import LoraSettings, MemorySettings, ModelSettings, ParallelSettings
from runtime.workload import Workload
from tests.gguf_files import write_wan
from tests.live_bytes import bytes_of_ranks
from tests.lora_files import Draw, differences, dora, kohya, loha, lokr, write
from tests.ranks import Case, sample_request

NEAR, HELD = 0.15, 0.03
FORMS = {
    "pair": kohya,
    "LoKr": partial(lokr, low=""),
    "LoKr that is a pair": partial(lokr, low="2"),
    "LoHa": partial(loha, rank=32),
    "LoHa that is a pair": partial(loha, rank=2),
    "DoRA by row": partial(dora, by_row=True),
    "DoRA by column": partial(dora, by_row=False),
    "differences": lambda layers, draw: differences(
        {f"{name}.weight": shape for name, shape in layers.items()},
        draw,
        [f"{name}.weight" for name in layers],
        key="diffusion_model.{}.diff",
    ),
}
GGUF = "gguf Q8_0"
CHANGES = [form for form in FORMS if "pair" not in form]
LAYERWISE = MemorySettings(offload="layerwise", resident_blocks="0")
WAYS = {
    "none": {}, "layerwise": {"memory": LAYERWISE}, "fp8": {"quant": "fp8"},
    "svdquant": {"quant": "svdquant-int4"}, "svdquant-nvfp4": {"quant": "svdquant-nvfp4"}, GGUF: {},
}  # fmt: skip
LATENT = (1, 16, 1, 8, 8)
"""So few tokens that a step works with little but what changes its weights."""


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("gguf") / "wan.gguf"
    write_wan(path, "Q8_0")
    return str(path)


def loras_of(form: str, model: str, path: Path, *, count: int = 1, fuse: bool = False) -> tuple[LoraSettings, ...]:
    """Files that change every Linear of the blocks of a model."""
    facts = inspect_model(model)
    layers = {
        name.removesuffix(".weight"): shape
        for name, shape in facts.shapes.items()
        if len(shape) == 2 and facts.spec.block_of(name)
    }
    tensors = FORMS[form](layers, Draw(1))
    files = [write(path / f"{number}.safetensors", tensors) for number in range(count)]
    return tuple(file.model_copy(update={"fuse": fuse}) for file in files)


def off_by(
    settings: ModelSettings, degrees: dict[str, int], *, latent: tuple[int, ...] = LATENT, text: int = 20
) -> tuple[float, float]:
    """The relative errors of a plan's bytes of weights with LoRAs, and of what a step works with beside them."""
    family = inspect_model(settings.model).family
    case = Case(model=settings.model, family=family, latent=latent, prompts=(text, text), steps=1, padded=False)
    held, work = bytes_of_ranks(settings, degrees, sample_request(case))
    parallel = ParallelSettings(devices=f"cpu:{Degrees(**degrees).product}", **degrees)
    machine, load = replace(Machine.here(), cuda=()), Workload(latent, text, 2)
    plan = plan_model(settings.model_copy(update={"parallel": parallel}), machine, workload=load)
    errors = plan.bytes_per_rank / held - 1, plan.activation_bytes / work - 1
    print(f"{family} {settings.quant} {settings.dtype} {degrees}: weights {errors[0]:+.2%}, step {errors[1]:+.1%}")
    return errors


def settings_of(way: str, dtype: str, gguf_file: str, **lora) -> ModelSettings:
    model = gguf_file if way == GGUF else "random:wan"
    return ModelSettings(model=model, dtype=dtype, loras=loras_of(model=model, **lora), **WAYS[way])


ALWAYS = (
    ("none", "pair", {"tensor": 2}),
    ("fp8", "DoRA by row", {"tensor": 2}),
    (GGUF, "LoKr", {}),
    ("layerwise", "differences", {}),
)


@pytest.mark.parametrize(
    ("way", "form", "degrees"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.full)
        for each in product(WAYS, FORMS, ({}, {"tensor": 2}))
    ],
)
def test_what_loras_take_is_what_the_plan_says(way, form, degrees, gguf_file, tmp_path):
    """A file that is mapped counts there with all of its pages, so that what is held of it is not compared."""
    held, work = off_by(settings_of(way, "fp32", gguf_file, form=form, path=tmp_path), degrees)
    assert abs(work) < NEAR and (way == GGUF or abs(held) < HELD)


@pytest.mark.full
@pytest.mark.parametrize(("way", "form"), product(WAYS, CHANGES))
def test_also_in_half_the_bits_and_two_at_once(way, form, gguf_file, tmp_path):
    for dtype, count in (("bf16", 1), ("fp32", 2)):
        settings = settings_of(way, dtype, gguf_file, form=form, path=tmp_path, count=count)
        held, work = off_by(settings, {})
        assert abs(work) < NEAR and (way == GGUF or abs(held) < HELD)


WIDER = (("flux2", "fp8"), ("sd3", "fp8"))
"""Where a first Linear is far wider than the model, or some blocks have wider ones than others."""


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        pytest.param(*each, marks=() if each in WIDER else pytest.mark.full)
        for each in product(FAMILIES, ("fp8", "none"))
    ],
)
def test_also_in_every_family(family, quant, tmp_path):
    spec, model = FAMILIES[family], f"random:{family}"
    memory, loras = MemorySettings() if quant == "fp8" else LAYERWISE, loras_of("DoRA by row", model, tmp_path)
    settings = ModelSettings(model=model, dtype="fp32", quant=quant, memory=memory, loras=loras)
    latent = (1, spec.latent.channels, *(1,) * (spec.latent.dims - 2), 16, 16)
    held, work = off_by(settings, {}, latent=latent, text=spec.text_length if spec.picture_tokens else 32)
    assert abs(held) < HELD and abs(work) < NEAR


def test_weights_with_something_folded_in_are_there_twice(gguf_file, tmp_path):
    settings = settings_of("none", "fp32", gguf_file, form="pair", path=tmp_path, fuse=True)
    assert abs(off_by(settings, {})[0]) < HELD


def test_a_fused_layer_is_a_pair_for_each_of_its_parts(tmp_path):
    """Each has the whole of `down`: more than the file."""
    layers = {"double_blocks.0.img_attn.qkv": (384, 128)}
    lora = write(tmp_path / "fused.safetensors", kohya(layers, Draw(1), name=lambda layer: f"lora_unet_{layer}"))
    settings = ModelSettings(model="random:flux", dtype="fp32", loras=(lora,))
    assert abs(off_by(settings, {}, latent=(1, 16, 8, 8))[0]) < HELD


def test_on_a_gpu_files_are_in_host_memory_too(tmp_path):
    lora = loras_of("pair", "random:wan", tmp_path)
    model = ModelSettings(model="random:wan", dtype="bf16", loras=lora)
    machine = replace(Machine.here(), cuda=(CudaDevice("GPU", 80 << 10),))
    plan, without = (plan_model(each, machine) for each in (model, model.model_copy(update={"loras": ()})))
    assert plan.host_bytes == plan.bytes_per_rank - without.bytes_per_rank > 0
    with pytest.raises(PlanRefused, match=r"but LoRAs take .* of host memory in all, and 1\.0 KiB are free"):
        plan_model(model, replace(machine, host=HostMemory(free=process_bytes(("cuda:0",)) + (1 << 10))))
