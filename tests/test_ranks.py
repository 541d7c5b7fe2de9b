"""N ranks give the latent of one rank, and one rank that of the bare diffusers class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline

from runtime.errors import Cancelled, Refused
from runtime.families import FAMILIES
from runtime.families.flux import FLUX
from runtime.families.qwen import QWEN
from runtime.families.wan import WAN
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning
from runtime.settings import ModelSettings
from tests.bare import bare_model, plain_euler
from tests.ranks import (
    FIRST,
    TABLE,
    Case,
    relative_error,
    run_as_threads,
    run_case,
    run_cases_as_processes,
    run_on_one,
    sample_request,
)

LIMIT = 2e-6
AGAINST_DIFFUSERS = 1e-5

EVEN, ODD, VIDEO = (1, 16, 1, 8, 8), (1, 16, 1, 5, 9), (1, 16, 3, 6, 10)
"""16 tokens; 15 tokens of a latent with odd sides; 45 tokens in 3 frames."""
REQUESTS = [
    {"latent": EVEN},
    {"latent": ODD},
    {"latent": VIDEO, "sampler": "euler_ancestral"},
    {"latent": ODD, "cfg": 1.0},
    {"latent": VIDEO, "cfg": 1.0},
    {"latent": EVEN, "prompts": (5, 9)},
    {"latent": VIDEO, "prompts": (12, 3), "sampler": "dpmpp_2m"},
    {"latent": (3, *ODD[1:]), "prompts": (5, 9)},
    {"latent": (3, *VIDEO[1:])},
    {"latent": (3, *VIDEO[1:]), "cfg": 1.0},
    {"latent": (1, 16, 1, 2, 2)},
    {"latent": EVEN, "regions": "entries", "prompts": (5, 9)},
    {"latent": VIDEO, "regions": "areas", "sampler": "dpmpp_2m"},
    {"latent": ODD, "regions": "areas", "cfg": 1.0},
    {"latent": (3, *ODD[1:]), "regions": "masks"},
    {"latent": VIDEO, "regions": "turns"},
]
"""One has a single token, and one an area of a single token: every rank but one has none."""


FEWER = [1, 3, 6, 7]
"""Odd sides, the same at cfg 1, a video with prompts of unequal length, a batch of three."""
FEW_TOKENS = {
    "one token of text": {"latent": (1, 16, 4, 6), "prompts": (1, 1)},
    "batch 3 without guidance": {"latent": (3, 16, 5, 9), "prompts": (7, 7), "cfg": 1.0},
}


def cases_of(numbers: Iterable[int] = range(len(REQUESTS)), /, **degrees: int) -> list[Case]:
    return [Case(**REQUESTS[number], degrees=degrees) for number in numbers]


def rows_of(*tables: dict[str, dict[str, Any]], relatives: bool = True, **degrees: int) -> list[Case]:
    """Every row of the tables for the first architectures, and one row for each of their relatives; for the others see
    `test_family_ranks`.
    """
    rows, cases, classes = [row for table in tables for row in table.values()], [], set()
    for family in (FAMILIES[name] for name in FIRST):
        few = [TABLE["uneven tokens"]] if relatives else []
        for row in few if family.transformer_class in classes else rows:
            cases.append(Case(**row, model=f"random:{family.name}", steps=2, degrees=degrees))
        classes.add(family.transformer_class)
    return cases


KINDS = ("data", "cfg", "ring", "ulysses", "tensor")
PAIRS = [dict.fromkeys(pair, 2) for pair in combinations(KINDS, 2)]
PROCESSES = {
    "two": [case for kind in KINDS for case in (*cases_of(**{kind: 2}), *rows_of(TABLE, FEW_TOKENS, **{kind: 2}))],
    "four": [
        *(case for pair in PAIRS for case in (*cases_of([14], **pair), *rows_of(TABLE, relatives=False, **pair))),
        *(case for kind in ("ring", "ulysses", "tensor") for case in cases_of(FEWER[2:], **{kind: 4})),
    ],
    "three": [case for kind in ("ulysses", "tensor") for case in rows_of({"": TABLE["uneven tokens"]}, **{kind: 3})],
}
"""Each kind alone, each pair, and the 4 heads of each family over 3 ranks."""
THREADS = {
    "ring ulysses tensor": {"ring": 2, "ulysses": 2, "tensor": 2},
    "cfg ulysses tensor": {"cfg": 2, "ulysses": 2, "tensor": 2},
    "cfg ring ulysses": {"cfg": 2, "ring": 2, "ulysses": 2},
    "data ring tensor": {"data": 2, "ring": 2, "tensor": 2},
    "cfg ulysses": {"cfg": 2, "ulysses": 4},
    "ring ulysses": {"ring": 2, "ulysses": 3},
    "cfg ring": {"cfg": 2, "ring": 3},
    "data tensor": {"data": 3, "tensor": 2},
}
"""Three kinds at once, more ranks than heads to share when the cfg axis is idle, and degrees that divide nothing."""


@pytest.fixture(scope="module")
def on_one_rank() -> Callable[[Case], torch.Tensor]:
    """The latent of a case on one rank, whatever degrees it names; each is worked out once."""
    results, pipelines = {}, {}

    def get(case: Case) -> torch.Tensor:
        case = replace(case, degrees={})
        if repr(case) not in results:
            results[repr(case)] = run_case(case, Mesh.single(), pipelines)
        return results[repr(case)]

    return get


@pytest.fixture(scope="module")
def from_processes(tmp_path_factory: pytest.TempPathFactory):
    """The results of a set of cases, each set run once."""
    results = {}

    def get(name: str, number: int) -> list[torch.Tensor]:
        if name not in results:
            results[name] = []  # so that a failure is not tried again for every case
            results[name] = run_cases_as_processes(PROCESSES[name], tmp_path_factory.mktemp(name))
        return results[name][number]

    return get


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, id=str(case))
        for name, cases in PROCESSES.items()
        for number, case in enumerate(cases)
    ],
)
def test_processes_equal_one_rank(name, number, on_one_rank, from_processes, record_property):
    reference = on_one_rank(PROCESSES[name][number])
    errors = [relative_error(result, reference) for result in from_processes(name, number)]
    record_property("relative_error", max(errors))
    print(f"relative error {max(errors):.2e}")
    assert max(errors) < LIMIT


@pytest.mark.parametrize("degrees", THREADS.values(), ids=THREADS)
def test_threads_equal_one_rank(degrees, on_one_rank):
    cases = [*cases_of(FEWER, **degrees), *rows_of(TABLE, FEW_TOKENS, **degrees)]
    references = [on_one_rank(case) for case in cases]

    def run(mesh: Mesh) -> list[torch.Tensor]:
        pipelines = {}
        return [run_case(case, mesh, pipelines) for case in cases]

    for results in run_as_threads(degrees, run):
        errors = list(map(relative_error, results, references))
        print("relative errors", *(f"{error:.1e}" for error in errors))
        assert max(errors) < LIMIT


@pytest.mark.parametrize("cfg", [1.0, 5.0])
@pytest.mark.parametrize("latent", [EVEN, VIDEO, (3, *EVEN[1:])], ids=str)
def test_one_rank_equals_an_euler_loop_over_the_diffusers_class(latent, cfg):
    case = Case(latent=latent, cfg=cfg, prompts=(5, 9))
    model = bare_model(WAN)

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        embedding = prompt.embedding.expand(len(x), -1, -1)
        return model(x, (sigma * 1000).expand(len(x)), embedding, return_dict=False)[0]

    [result] = run_on_one([case])
    error = relative_error(result, plain_euler(case, WAN, velocity))
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("latent", [(1, 16, 8, 8), (3, 16, 4, 6)], ids=str)
def test_flux_equals_an_euler_loop_over_the_diffusers_class(latent, cfg):
    case = Case(model="random:flux", latent=latent, cfg=cfg, prompts=(5, 9))
    model, (rows, columns) = bare_model(FLUX), (latent[2] // 2, latent[3] // 2)
    places = torch.tensor([(0.0, row, column) for row in range(rows) for column in range(columns)])

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, length = len(x), prompt.embedding.shape[1]
        tokens = FluxPipeline._pack_latents(x, batch, 16, *latent[2:])
        output = model(
            hidden_states=tokens,
            encoder_hidden_states=prompt.embedding.expand(batch, -1, -1),
            pooled_projections=prompt.pooled.expand(batch, -1),
            timestep=sigma.expand(batch),
            guidance=torch.full((batch,), prompt.guidance),
            img_ids=places,
            txt_ids=torch.zeros(length, 3),
            return_dict=False,
        )[0]
        return FluxPipeline._unpack_latents(output, latent[2] * 8, latent[3] * 8, vae_scale_factor=8)

    [result] = run_on_one([case])
    error = relative_error(result, plain_euler(case, FLUX, velocity))
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("latent", [(1, 16, 8, 8), (3, 16, 4, 12)], ids=str)
def test_qwen_image_equals_an_euler_loop_over_the_diffusers_class(latent, cfg):
    """With padded prompts, and an even number of rows and columns of patches; for others, see test_comfyui_models."""
    case = Case(model="random:qwen", latent=latent, cfg=cfg, prompts=(5, 9))
    model, (rows, columns) = bare_model(QWEN), (latent[2] // 2, latent[3] // 2)

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch = len(x)
        output = model(
            hidden_states=QwenImagePipeline._pack_latents(x, batch, 16, *latent[2:]),
            encoder_hidden_states=prompt.embedding.expand(batch, -1, -1),
            encoder_hidden_states_mask=prompt.attention_mask.expand(batch, -1),
            timestep=sigma.expand(batch),
            img_shapes=[[(1, rows, columns)]] * batch,
            return_dict=False,
        )[0]
        return QwenImagePipeline._unpack_latents(output, latent[2] * 8, latent[3] * 8, vae_scale_factor=8)[:, :, 0]

    [result] = run_on_one([case])
    error = relative_error(result[:, :, 0], plain_euler(case, QWEN, velocity))
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS


def test_all_ranks_stop_at_the_step_at_which_the_first_is_told_to_and_go_on_afterwards():
    case = Case(degrees={"cfg": 2, "ulysses": 2})
    [reference] = run_on_one([case])

    def run(mesh: Mesh) -> tuple[list[int], torch.Tensor]:
        pipelines, steps = {}, []

        def stop_at_two(stage, step, total, *, preview=None, together=True) -> None:
            steps.append(step)
            if mesh.agree(int(mesh.rank == 0 and step == 2)):
                raise Cancelled

        run_case(case, mesh, pipelines)
        [pipeline] = pipelines.values()
        with pytest.raises(Cancelled):
            pipeline.sample(sample_request(case), progress=stop_at_two)
        return steps, run_case(case, mesh, pipelines)

    for steps, result in run_as_threads(case.degrees, run):
        assert steps == [1, 2] and relative_error(result, reference) < LIMIT


def test_only_the_first_rank_has_the_prompt():
    def run(mesh: Mesh) -> bool:
        pipeline = Pipeline.load(ModelSettings(model="tiny-shapes"), mesh=mesh, progress=ignore_progress)
        mesh.agree(0)  # transformers changes torch itself while it loads: no other thread may be building then
        return pipeline.encode_text("red", progress=ignore_progress) is not None

    assert run_as_threads({"ulysses": 2}, run) == [True, False]


def test_every_rank_refuses_alike_so_that_the_model_stays_loaded():
    def run(mesh: Mesh) -> list[str]:
        without = Pipeline.load(ModelSettings(model="random:wan"), mesh=mesh, progress=ignore_progress)
        wrong = (
            lambda: without.encode_text("red", progress=ignore_progress),
            lambda: without.decode(torch.zeros(1, 16, 1, 2, 2), progress=ignore_progress),
        )
        return [_refusal(call) for call in wrong]

    first, second = run_as_threads({"ulysses": 2}, run)
    assert first == second and all(first)


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as refusal:
        call()
    return str(refusal.value)
