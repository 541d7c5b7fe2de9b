"""What the call of a Linear is said to take is what it takes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from runtime.activations import activation_bytes
from runtime.degrees import Degrees
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.machine import CudaDevice, Machine
from runtime.parallel.shares import WHOLE
from runtime.plan import make_plan
from runtime.quant import CORES
from runtime.quant.svdquant import core as four_bit
from runtime.settings import ModelSettings, ParallelSettings
from runtime.stored import BLOCKS, FP8, SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4, Stored
from runtime.temporaries import call_bytes
from runtime.workload import Workload
from tests.gguf_files import write_wan
from tests.live_bytes import LiveBytes, bytes_of_ranks
from tests.ranks import Case, family_case, sample_request
from tests.test_activations import drawn_case

FOUR_BITS = (SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4)
SHAPES = ((512, 128), (128, 512), (100, 200), (640, 256))
NEAR = 0.15
NARROW = ("lumina2", "zimage")


def call_off_by(kind: str, shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> float:
    """The relative error of what is said of a call."""
    core = CORES[kind](nn.Linear(*shape[::-1], bias=False, dtype=dtype, device="meta"), WHOLE, Stored(kind))
    if kind in BLOCKS:
        core.place("weight", torch.randint(256, core.weight.shape, dtype=torch.uint8))
    else:
        core.place("weight", torch.randn(shape, dtype=dtype))
    x = torch.randn(tokens, shape[1]).to(dtype)
    with torch.inference_mode(), LiveBytes() as live:
        core(x, None)
    return call_bytes(Stored(kind), shape, tokens, dtype.itemsize) / live.peak - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FP8, *FOUR_BITS])
def test_a_call_takes_what_is_said(kind, dtype):
    errors = [call_off_by(kind, shape, tokens, dtype) for shape in SHAPES for tokens in (10, 2000)]
    assert max(map(abs, errors)) < 0.02, errors


@pytest.mark.parametrize("kind", BLOCKS)
def test_and_one_that_reads_blocks(kind):
    pytest.importorskip("gguf")
    errors = [call_off_by(kind, (1024, 2048), tokens, torch.float32) for tokens in (10, 3000)]
    assert max(map(abs, errors)) < 0.02, errors


def test_of_a_large_weight_some_rows_are_unpacked_at_a_time(monkeypatch):
    core = CORES[SVDQUANT_NVFP4](nn.Linear(384, 1000, bias=False, device="meta"), WHOLE, Stored(SVDQUANT_NVFP4))
    core.place("weight", torch.randn(1000, 384))
    x, [whole] = torch.randn(5, 384), [core.weight(torch.empty(()))]
    monkeypatch.setattr(four_bit, "AT_ONCE", 256 * 384)
    with LiveBytes() as live:
        assert torch.equal(core.weight(x), whole)
    assert live.peak < whole.nbytes * 1.1 + 256 * 384 * 9 + 1024 * 384 / 2


def step_off_by(case: Case, degrees: dict[str, int], quant: str = "none") -> float:
    """The relative error of the estimate for a step."""
    settings, request = ModelSettings(model=case.model, dtype=case.dtype, quant=quant), sample_request(case)
    _, measured = bytes_of_ranks(settings, degrees, request)
    facts = inspect_model(case.model, quant=quant)
    estimated = activation_bytes(facts, Degrees(**degrees), Workload.of(request), dtype=case.dtype, on_host=True)
    print(f"{case.model} {quant} {degrees} {case.dtype}: {estimated / measured - 1:+.1%}")
    return estimated / measured - 1


@pytest.mark.parametrize("kind", ["Q8_0", "IQ2_XS"])
def test_a_step_of_a_file_in_blocks(kind, tmp_path):
    pytest.importorskip("gguf")
    write_wan(tmp_path / "wan.gguf", kind)
    case = family_case(
        "wan", model=str(tmp_path / "wan.gguf"), latent=(1, 16, 1, 40, 48), prompts=(20, 20), padded=False, dtype="fp32"
    )
    assert max(abs(step_off_by(case, degrees)) for degrees in ({}, {"tensor": 2})) < NEAR


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("quant", ["fp8", "svdquant-int4", "svdquant-nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_and_format(family, quant, degrees, dtype):
    spec = FAMILIES[family]
    text, dims = spec.text_length if spec.picture_tokens else 20, (1,) * (spec.latent.dims - 2)
    case = family_case(
        family, latent=(1, spec.latent.channels, *dims, 40, 48), prompts=(text, text), padded=False, dtype=dtype
    )
    if quant == "svdquant-int4" and family in NARROW and degrees:
        pytest.skip("half of the small model's inputs are no whole groups")
    assert abs(step_off_by(case, degrees, quant)) < NEAR


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_a_step_of_whatever_is_asked_in_any_format(seed):
    draw = random.Random(seed)
    quant = draw.choice(["fp8", "svdquant-int4", "svdquant-nvfp4"])
    case, degrees = drawn_case(draw)
    if quant != "fp8" and "tensor" in degrees and case.model.removeprefix("random:") in NARROW:
        pytest.skip("half of the small model's inputs are no whole groups")
    assert abs(step_off_by(case, degrees, quant)) < NEAR


def test_what_kernels_round_is_little_and_is_what_is_said_of_a_gpu(monkeypatch):
    facts = inspect_model("random:flux", quant="svdquant-int4")
    load = Workload((1, 16, 64, 64), text=20, branches=1)
    plain = activation_bytes(facts, Degrees(), load, dtype="bf16")
    for there in (True, False):
        monkeypatch.setattr("runtime.needs.has_triton", lambda there=there: there)
        plan = make_plan(ParallelSettings(), facts, Machine(cuda=(CudaDevice("GPU", 8 << 10),)), workload=load)
        assert (plan.activation_bytes < plain) is there
