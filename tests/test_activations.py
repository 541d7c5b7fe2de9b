"""What a plan says that a step works with is what it works with."""

from __future__ import annotations

import pytest

from runtime.activations import activation_bytes
from runtime.degrees import Degrees
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from runtime.workload import Workload
from tests.live_bytes import LiveBytes
from tests.ranks import Case, run_as_threads, sample_request

NEAR = 0.15
PLANS = ({}, {"tensor": 2}, {"ulysses": 2})
MORE_PLANS = (
    {"ring": 2},
    {"ring": 3},
    {"ulysses": 2, "ring": 2},
    {"ulysses": 2, "tensor": 2},
    {"cfg": 2},
    {"cfg": 2, "ulysses": 2},
    {"data": 2},
)


def measured(case: Case, degrees: dict[str, int]) -> int:
    """The most bytes of tensors that the rank which holds most makes in a step, beside its weights."""
    settings = ModelSettings(model=case.model, dtype=case.dtype)

    def run(mesh: Mesh) -> int:
        pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
        request = sample_request(case)
        with LiveBytes() as live:
            pipeline.sample(request, progress=ignore_progress)
        return live.peak

    return max(run_as_threads(degrees, run)) if degrees else run(Mesh.single())


def off_by(
    family: str, degrees: dict[str, int], *, batch: int = 1, text: int = 20, cfg: float = 1.0, dtype: str = "fp32"
):
    """The relative error of the estimate for a step of a picture."""
    form, spec = FAMILIES[family].latent, FAMILIES[family]
    text = spec.text_length if spec.picture_tokens else text
    latent = (batch, form.channels, *(1,) * (form.dims - 2), 40, 48)
    case = Case(
        model=f"random:{family}", latent=latent, prompts=(text, text), steps=1, cfg=cfg, padded=False, dtype=dtype
    )
    load = Workload(latent, text=text, branches=1 if cfg == 1 else 2)
    estimated = activation_bytes(inspect_model(case.model), Degrees(**degrees), load, dtype=dtype)
    error = estimated / measured(case, degrees) - 1
    print(f"{family} {degrees} batch {batch} text {text} cfg {cfg:g} {dtype}: {error:+.1%}")
    return error


@pytest.mark.parametrize("degrees", PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_works_with_what_the_plan_says(family, degrees):
    assert abs(off_by(family, degrees)) < NEAR


@pytest.mark.parametrize("degrees", [{"ulysses": 2, "ring": 2}], ids=str)
def test_also_in_half_the_bits_where_positions_stay_in_float32(degrees):
    assert abs(off_by("ltx", degrees, dtype="bf16")) < NEAR


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("degrees", PLANS + MORE_PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_also_with_a_batch_and_two_prompts(family, degrees, dtype):
    assert abs(off_by(family, degrees, batch=2, cfg=5.0, dtype=dtype)) < NEAR


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{"text": 200}, {"dtype": "bf16"}], ids=str)
def test_also_with_a_long_prompt_and_in_half_the_bits(family, options):
    assert abs(off_by(family, {}, **options)) < NEAR
