"""Samplers of every kind on two and four ranks give the latent of one rank; a cancel between model calls stops all."""

from __future__ import annotations

from dataclasses import replace

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
ON_FOUR = {"cfg": {"cfg": 2, "ring": 2}, "ulysses": {"ulysses": 2, "tensor": 2}}
"""The degrees on four ranks, by the axis on two."""


def cases(ranks: int) -> list[Case]:
    """The cells on so many ranks. The third of every four has cfg 1: no second branch, but for CFG++."""
    made = [
        Case(sampler=sampler, scheduler=scheduler, steps=3, cfg=cfg, prompts=(5, 9))
        for (sampler, scheduler, _), cfg in zip(CELLS, 3 * (4.0, 4.0, 1.0, 4.0), strict=True)
    ]
    degrees = [{axis: 2} if ranks == 2 else ON_FOUR[axis] for _, _, axis in CELLS]
    together = sorted(zip(made, degrees, strict=True), key=lambda pair: list(pair[1]))  # a mesh is made once
    return [replace(case, degrees=each) for case, each in together]


CASES = {ranks: cases(ranks) for ranks in (2, 4)}


@pytest.mark.parametrize("ranks", CASES)
def test_ranks_give_the_latents_of_one(ranks, tmp_path):
    references = run_on_one(CASES[ranks])
    for case, reference, results in zip(
        CASES[ranks], references, run_cases_as_processes(CASES[ranks], tmp_path), strict=True
    ):
        error = max(relative_error(result, reference) for result in results)
        print(f"{case}: relative error {error:.2e}")
        assert len(results) == ranks and error < LIMIT, str(case)


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
