"""N ranks give the latent of one rank, and one rank that of the bare diffusers class."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, pairwise

import diffusers
import pytest
import torch

from runtime.checkpoint import random_tensors
from runtime.errors import Cancelled
from runtime.families.wan import TINY, WAN
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.sampling import FlowTable, make_sigmas
from runtime.settings import ModelSettings
from tests.ranks import (
    TEXT_WIDTH,
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


def cases_of(numbers: Iterable[int] = range(len(REQUESTS)), /, **degrees: int) -> list[Case]:
    return [Case(**REQUESTS[number], degrees=degrees) for number in numbers]


KINDS = ("data", "cfg", "ring", "ulysses", "tensor")
PROCESSES = {
    "two": [case for kind in KINDS for case in cases_of(**{kind: 2})],
    "four": [
        *(case for pair in combinations(KINDS, 2) for case in cases_of(FEWER, **dict.fromkeys(pair, 2))),
        *(case for kind in ("ring", "ulysses", "tensor") for case in cases_of(FEWER[2:], **{kind: 4})),
    ],
}
"""Each kind alone, and each pair."""
THREADS = {
    "ring ulysses tensor": {"ring": 2, "ulysses": 2, "tensor": 2},
    "cfg ulysses tensor": {"cfg": 2, "ulysses": 2, "tensor": 2},
    "cfg ring ulysses": {"cfg": 2, "ring": 2, "ulysses": 2},
    "data ring tensor": {"data": 2, "ring": 2, "tensor": 2},
    "cfg ulysses": {"cfg": 2, "ulysses": 4},
    "cfg ring": {"cfg": 2, "ring": 3},
    "data tensor": {"data": 3, "tensor": 2},
}
"""Three kinds at once, more ranks than heads to share when the cfg axis is idle, and degrees that divide nothing."""


@pytest.fixture(scope="module")
def from_processes(tmp_path_factory: pytest.TempPathFactory):
    """The results of a set of cases, each set run once."""
    results = {}

    def get(name: str, number: int) -> list[torch.Tensor]:
        if name not in results:
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
def test_processes_equal_one_rank(name, number, from_processes, record_property):
    [reference] = run_on_one([PROCESSES[name][number]])
    errors = [relative_error(result, reference) for result in from_processes(name, number)]
    record_property("relative_error", max(errors))
    print(f"relative error {max(errors):.2e}")
    assert max(errors) < LIMIT


@pytest.mark.parametrize("degrees", THREADS.values(), ids=THREADS)
def test_threads_equal_one_rank(degrees):
    cases = cases_of(FEWER, **degrees)
    references = run_on_one(cases)

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
    [result] = run_on_one([case])
    reference = plain_euler(case)
    error = relative_error(result, reference)
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS


@torch.inference_mode()
def plain_euler(case: Case) -> torch.Tensor:
    """What the request asks for, written out over an untouched diffusers model with the same random weights."""
    model = diffusers.WanTransformer3DModel(**TINY).eval()
    model.load_state_dict(random_weights(model))
    request = sample_request(case)
    x = torch.randn(case.latent, generator=torch.Generator().manual_seed(request.settings.seed))
    sigmas = make_sigmas("simple", case.steps, table=FlowTable(shift=WAN.shift), sampler_name="euler")

    def velocity(embedding: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        embedding = embedding.expand(x.shape[0], -1, TEXT_WIDTH)
        return model(x, (sigma * 1000).expand(x.shape[0]), embedding, return_dict=False)[0]

    for sigma, following in pairwise(sigmas):
        guided = velocity(request.positive[0].embedding, sigma)
        if case.cfg != 1.0:
            negative = velocity(request.negative[0].embedding, sigma)
            guided = negative + (guided - negative) * case.cfg
        x = x + guided * (following - sigma)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (WAN.latent.mean, WAN.latent.std))
    return x * std + mean


def random_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that `random:wan` has."""
    return dict(random_tensors({name: tensor.shape for name, tensor in model.state_dict().items()}))


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


def test_only_the_first_rank_encodes_and_decodes():
    def run(mesh: Mesh) -> tuple:
        pipeline = Pipeline.load(ModelSettings(model="random:wan"), mesh=mesh, progress=ignore_progress)
        if mesh.rank == 0:
            return None, None
        text = pipeline.encode_text("red", progress=ignore_progress)
        return text, pipeline.decode(torch.zeros(1, 16, 1, 2, 2), progress=ignore_progress)

    assert run_as_threads({"ulysses": 2}, run) == [(None, None)] * 2
