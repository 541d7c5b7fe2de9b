"""Every plan of a generated set uses all its devices, or is refused with one that does, and that then runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from functools import cache

import pytest

from runtime.inspection import inspect_model
from runtime.machine import Machine
from runtime.mesh import Mesh
from runtime.plan import Plan, PlanRefused, make_plan
from runtime.settings import AXES, ParallelSettings
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_on_one

MODELS = ("random:wan", "random:flux")
SIZES = range(1, 9)
LIMIT = 2e-6
NO_GPU = Machine(cores=8)


def every_setting() -> Iterable[ParallelSettings]:
    """Devices and degrees from 1 to 8, legal or not: 262144 of them."""
    for count, *degrees in itertools.product(SIZES, repeat=1 + len(AXES)):
        fields = dict(zip(AXES, degrees, strict=True))
        yield ParallelSettings.model_construct(devices=f"cpu:{count}", **fields)


def some_settings(number: int) -> Iterable[ParallelSettings]:
    """Of the same, small degrees more often, so that legal ones are among them."""
    drawn = random.Random(number)
    for _ in range(number):
        degrees = {axis: drawn.choice((1, 1, 1, 1, 2, 2, *SIZES)) for axis in AXES}
        yield ParallelSettings.model_construct(devices=f"cpu:{drawn.choice(SIZES)}", **degrees)


def planned(model: str, settings: Iterable[ParallelSettings]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The degrees of the plans accepted, and of the nearest plans that refusals name; both use all their devices."""
    facts, accepted, nearest = inspect_model(model), set(), set()

    @cache  # many refusals name the same
    def plan_of(parallel: ParallelSettings) -> Plan:
        return make_plan(parallel, facts, NO_GPU)

    for each in settings:
        try:
            plan = plan_of(each)
            assert plan.degrees == each.set_degrees and len(plan.devices) == each.device_count
            accepted.add(checked(plan))
        except PlanRefused as refusal:
            plan = plan_of(refusal.nearest)
            assert all(f"{axis} {degree}" in str(refusal) for axis, degree in plan.degrees.items()), str(refusal)
            assert f"devices cpu:{plan.world}" in str(refusal)
            nearest.add(checked(plan))
    return accepted, nearest


def checked(plan: Plan) -> tuple[int, ...]:
    """The degrees of a plan that uses all its devices."""
    assert plan.world == len(plan.devices)
    return tuple(plan.degrees.values())


@cache
def on_one_rank(model: str, batch: int):
    """What one rank makes of the case."""
    return run_on_one([case_of(model, {"data": batch})])[0]


def case_of(model: str, degrees: dict[str, int]) -> Case:
    """One step of an item for each replica, with tokens that no degree divides."""
    batch = degrees["data"]
    latent = (batch, 16, 1, 10, 6) if model == "random:wan" else (batch, 16, 10, 6)
    return Case(model=model, latent=latent, steps=1, degrees=degrees)


def assert_runs(model: str, degrees: tuple[int, ...]) -> None:
    """The plan gives one rank's latent on every one of its ranks."""
    case = case_of(model, dict(zip(AXES, degrees, strict=True)))

    def run(mesh: Mesh) -> None:
        error = relative_error(run_case(case, mesh, {}), on_one_rank(model, case.degrees["data"]))
        assert error < LIMIT, f"{case}: {error:.1e}"

    on_one_rank(model, case.degrees["data"])
    run_as_threads(case.degrees, run) if case.degrees != dict.fromkeys(AXES, 1) else run(Mesh.single())


@pytest.mark.parametrize("model", MODELS)
def test_plans_use_all_their_devices_and_refusals_name_one_that_runs(model):
    accepted, nearest = planned(model, some_settings(3000))
    print(f"{model}: {len(accepted)} plans accepted, refusals name {len(nearest)}")
    assert len(accepted) > 20 and len(nearest) > 20
    for degrees in random.Random(1).sample(sorted(nearest), 4):
        assert_runs(model, degrees)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_of_all_plans_every_one_that_a_refusal_names_runs(model):
    accepted, nearest = planned(model, every_setting())
    print(f"{model}: {len(accepted)} plans accepted, refusals name {len(nearest)}")
    assert nearest <= accepted
    for degrees in sorted(accepted):
        assert_runs(model, degrees)
