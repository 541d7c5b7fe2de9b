"""What a plan says of a rank's memory is what the rank holds."""

from __future__ import annotations

import json

import pytest

from runtime.families import FAMILIES
from runtime.footprint import bytes_per_rank
from runtime.inspection import RECORDED, inspect_model
from runtime.machine import Machine
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.plan import make_plan
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings, ParallelSettings
from tests.ranks import run_as_threads
from tests.record_tiny import shapes_of

NO_GPU = Machine()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("degree", "dtype"), [(1, "bf16"), (2, "fp32"), (4, "bf16")])
def test_the_bytes_of_a_plan_are_those_of_the_rank_that_holds_most(family, degree, dtype):
    settings = ModelSettings(model=f"random:{family}", dtype=dtype)

    def held(mesh: Mesh) -> int:
        pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
        return sum(tensor.nbytes for tensor in pipeline.transformer.state_dict().values())

    most = max(run_as_threads({"tensor": degree}, held)) if degree > 1 else held(Mesh.single())
    facts = inspect_model(settings.model)
    assert bytes_per_rank(facts, dtype=dtype, tensor=degree) == most
    plan = make_plan(ParallelSettings(devices=f"cpu:{degree}", tensor=degree), facts, NO_GPU, dtype=dtype)
    assert plan.bytes_per_rank == most


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_shapes_are_those_of_the_class(family):
    recorded = json.loads((RECORDED / f"{family}.json").read_text(encoding="utf-8"))
    assert recorded == shapes_of(family), "write them anew: python -m tests.record_tiny"
