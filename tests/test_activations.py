"""What a plan says that a step works with is what it works with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from runtime.activations import activation_bytes
from runtime.degrees import Degrees
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.protocol import Conditioning, Sample
from runtime.settings import ModelSettings
from runtime.workload import Workload
from tests.live_bytes import bytes_of_ranks
from tests.ranks import Case, family_case, sample_request

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


def measured(case: Case, degrees: dict[str, int], request: Sample | None = None) -> int:
    """The most bytes of tensors that the rank which holds most makes in a step, beside its weights."""
    settings = ModelSettings(model=case.model, dtype=case.dtype)
    return bytes_of_ranks(settings, degrees, request or sample_request(case))[1]


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


def test_tables_of_positions_stay_in_float32_in_half_the_bits():
    """Counted in bf16 they leave 8 % out on one rank, and 18 % over some."""
    assert abs(off_by("ltx", {}, dtype="bf16")) < NEAR / 3


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


REFERENCES = {"references": (torch.zeros(1, 16, 1, 40, 48),)}
HALVES = [{"area": (40, 24, 0, 0)}, {"area_percent": (1.0, 0.5, 0.0, 0.5)}]
SHARED = {
    "prompts of two lengths": {"prompts": (20, 60)},
    "prompts of two lengths, a rank for each": {"prompts": (20, 60), "degrees": {"cfg": 2}},
    "three entries": {"entries": [{}, {"strength": 0.4}, {"strength": 0.2}]},
    "more than go through the model together": {"entries": [{}] * 6},
    "two halves": {"entries": HALVES},
}
"""What the positive side of guidance has, beside a negative prompt."""


@pytest.mark.parametrize("name", SHARED)
def test_entries_go_through_the_model_together_where_the_plan_says(name):
    off = regions_off_by("wan", **SHARED[name])
    assert abs(off) < NEAR


@pytest.mark.parametrize("method", ["", "index", "index_timestep_zero"])
@pytest.mark.parametrize("family", ["qwen", "qwen-2511"])
def test_references_of_one_side_count_for_that_side_by_where_they_stand(family, method):
    assert abs(regions_off_by(family, entries=[{**REFERENCES, "reference_method": method}])) < NEAR


def test_so_do_those_of_a_family_without_that_choice():
    reference = torch.zeros(1, 128, 40, 48)
    assert abs(regions_off_by("flux2", entries=[{"references": (reference,)}])) < NEAR


def test_entries_that_take_turns_count_together_for_the_step_at_which_they_meet():
    """Whether there is one depends on the schedule, so that the estimate may be too large, and is not too small."""
    turns = [{"end_percent": 0.3}, {"start_percent": 0.3}]
    apart = [{"end_percent": 0.3}, {"start_percent": 0.31}]
    assert -NEAR < regions_off_by("wan", entries=apart, steps=4) < NEAR
    assert NEAR < regions_off_by("wan", entries=turns, steps=4) < 0.5


@pytest.mark.full
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("family", [name for name in FAMILIES if not FAMILIES[name].picture_tokens])
def test_also_in_every_family(family, name):
    assert abs(regions_off_by(family, **SHARED[name])) < NEAR


def regions_off_by(family: str, *, entries: Sequence[dict] = ({},), degrees: dict | None = None, **changes) -> float:
    """The relative error of the estimate for a request with these entries on its positive side."""
    form = FAMILIES[family].latent
    latent = (1, form.channels, *(1,) * (form.dims - 2), 40, 48)
    case = family_case(family, **{"latent": latent, "prompts": (20, 20), "padded": False, **changes})
    drawn = sample_request(case)
    positive = [Conditioning(**{**dict(drawn.positive[0]), **fields}) for fields in entries]
    request = drawn.model_copy(update={"positive": tuple(positive)})
    load, degrees = Workload.of(request), degrees or {}
    estimated = activation_bytes(inspect_model(case.model), Degrees(**degrees), load, dtype="fp32")
    error = estimated / measured(case, degrees, request) - 1
    print(f"{family} {changes}: {error:+.1%}")
    return error
