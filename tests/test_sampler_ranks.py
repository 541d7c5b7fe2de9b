"""Samplers of every kind on two ranks give the latent of one rank, on each axis; a cancel between model calls stops both."""

from __future__ import annotations

import pytest

from runtime.errors import Cancelled
from runtime.mesh import Mesh
from tests.ranks import (
    Case,
    relative_error,
    run_as_threads,
    run_case,
    run_cases_as_processes,
    run_on_one,
    sample_request,
)

LIMIT = 1e-5
CELLS = [
    ("euler_ancestral_cfg_pp", "beta", "cfg"),
    ("heunpp2", "normal", "ulysses"),
    ("dpm_2_ancestral", "sgm_uniform", "cfg"),
    ("lms", "karras", "ulysses"),
    ("dpm_adaptive", "simple", "cfg"),
    ("dpmpp_sde", "exponential", "ulysses"),
    ("dpmpp_3m_sde_gpu", "kl_optimal", "cfg"),
    ("deis", "linear_quadratic", "ulysses"),
    ("res_multistep_cfg_pp", "simple", "cfg"),
    ("seeds_3", "ddim_uniform", "ulysses"),
    ("sa_solver_pece", "simple", "cfg"),
    ("uni_pc_bh2", "beta", "ulysses"),
]
CASES = [
    Case(sampler=sampler, scheduler=scheduler, degrees={axis: 2}, steps=3, cfg=cfg, prompts=(5, 9))
    for (sampler, scheduler, axis), cfg in zip(CELLS, 3 * (4.0, 4.0, 1.0, 4.0), strict=True)
]
"""The third of every four has cfg 1: no second branch, but for CFG++."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """From two real processes, by case and rank."""
    return run_cases_as_processes(CASES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(map(str, CASES)))
def test_two_ranks_give_the_latent_of_one(number, results):
    [reference] = run_on_one([CASES[number]])
    errors = [relative_error(result, reference) for result in results[number]]
    print(f"relative error {max(errors):.2e}")
    assert max(errors) < LIMIT


def test_cfg_pp_evaluates_the_negative_prompt_at_cfg_1():
    first, second = (
        Case(sampler="euler_cfg_pp", cfg=1.0, prompts=prompts, latent=(1, 16, 1, 4, 4)) for prompts in ((5, 9), (5, 3))
    )
    assert relative_error(*run_on_one([first, second])) > 1e-4


def test_all_ranks_stop_between_two_model_calls_of_one_step():
    case = Case(degrees={"cfg": 2}, sampler="seeds_3")

    def run(mesh: Mesh) -> list[int]:
        pipelines, steps = {}, []

        def stop_in_the_second_step(stage, step, total, *, preview=None, together=True) -> None:
            steps.append(step)
            if mesh.agree(int(mesh.rank == 0 and steps == [1, 1, 1, 2, 2])):
                raise Cancelled

        run_case(case, mesh, pipelines)
        [pipeline] = pipelines.values()
        with pytest.raises(Cancelled):
            pipeline.sample(sample_request(case), progress=stop_in_the_second_step)
        return steps

    for steps in run_as_threads(case.degrees, run):
        assert steps == [1, 1, 1, 2, 2]
