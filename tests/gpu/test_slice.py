"""The first slice on CUDA: one device against the processor, and as many as there are against one.

`tests/gpu/run` runs this; without a GPU every test is skipped with the reason.
"""

from __future__ import annotations

import pytest
import torch

from runtime.inspection import inspect_model
from runtime.machine import Machine
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.plan import make_plan
from runtime.progress import ignore_progress
from runtime.protocol import Sample
from runtime.settings import TINY_SHAPES, ModelSettings, ParallelSettings, SampleSettings
from runtime.tiny_shapes import MODEL_FOLDER
from tests.ranks import Case, relative_error, run_case, run_cases_as_processes, run_on_one

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device: torch sees none"),
]

FLOAT32_LIMIT = 1e-4
"""Other kernels, other order of sums; TF32 stays off."""
CASES = [
    Case(latent=(1, 16, 1, 5, 9), prompts=(5, 9), dtype="fp32"),
    Case(latent=(3, 16, 3, 6, 10), sampler="dpmpp_2m", dtype="fp32"),
    Case(latent=(1, 16, 3, 6, 10), cfg=1.0, sampler="uni_pc", dtype="fp32", steps=6),
]


def on_gpu(case: Case) -> torch.Tensor:
    return run_case(case, Mesh.single("cuda:0"), {})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_gpu_equals_the_processor(case):
    [reference] = run_on_one([case])
    error = relative_error(on_gpu(case), reference)
    print(f"relative error {error:.2e}")
    assert error < FLOAT32_LIMIT


def test_the_default_precision_is_near_full_precision():
    case = CASES[0]
    error = relative_error(on_gpu(Case(latent=case.latent, prompts=case.prompts)), on_gpu(case))
    print(f"relative error of bf16 {error:.2e}")
    assert error < 0.05


def test_the_planner_sees_the_gpus_that_torch_sees():
    assert len(Machine.here().cuda) == GPUS


@pytest.mark.skipif(not (MODEL_FOLDER / "model_index.json").is_file(), reason="needs the trained model in the pack")
def test_prompt_to_picture_on_one_gpu():
    settings = ModelSettings(model=TINY_SHAPES)
    pipeline = Pipeline.load(settings, mesh=Mesh.single("cuda:0"), progress=ignore_progress)
    text = pipeline.encode_text("a red circle on a blue background", progress=ignore_progress)
    assert text.embedding.device.type == "cpu" and text.embedding.isfinite().all()
    empty = pipeline.encode_text("", progress=ignore_progress)
    request = Sample(
        job="test",
        model=settings,
        settings=SampleSettings(steps=20, cfg=5.0),
        positive=(text,),
        negative=(empty,),
        latent=torch.zeros(1, 16, 1, 8, 8),
    )
    [picture] = pipeline.decode(pipeline.sample(request, progress=ignore_progress), progress=ignore_progress)
    assert picture.shape == (64, 64, 3) and picture.device.type == "cpu"
    red, _, blue = picture.unbind(-1)
    assert ((red > 0.6) & (blue < 0.4)).any() and ((blue > 0.6) & (red < 0.4)).any()


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices: torch sees {GPUS}")
@pytest.mark.parametrize("axis", ["ulysses", "cfg"])
def test_two_gpus_equal_one(axis, tmp_path):
    cases = [Case(**{**vars(case), "degrees": {axis: 2}}) for case in CASES]
    for case, results in zip(cases, run_cases_as_processes(cases, tmp_path, kind="cuda"), strict=True):
        reference = on_gpu(Case(**{**vars(case), "degrees": {}}))
        assert all(relative_error(result, reference) < FLOAT32_LIMIT for result in results)


def test_a_plan_for_the_gpus_uses_all_of_them():
    if GPUS in (1, 2, 4, 8):
        plan = make_plan(ParallelSettings(), inspect_model("random:wan"), Machine.here())
        assert plan.devices == tuple(f"cuda:{number}" for number in range(GPUS))
