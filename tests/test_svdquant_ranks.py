"""A model in 4 bits over ranks is the model in 4 bits on one rank."""

from __future__ import annotations

from dataclasses import replace
from threading import current_thread

import pytest
import torch

from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.machine import Machine
from runtime.mesh import Mesh
from runtime.plan import make_plan
from runtime.quant.svdquant import core
from runtime.quant.svdquant.formats import Format, round_activations
from runtime.settings import ParallelSettings
from tests.ranks import TABLE, Case, relative_error, run_as_threads, run_case, run_on_one

LIMIT = 2e-6
FLIP_LIMIT = 0.1
"""Sums in another order differ in their last bit. Where that decides how one activation is rounded, it goes a whole step
another way, which later layers and guidance make more of: 0.038 at most in these cases, where 4 bits themselves cost 0.3.
"""
LATENTS = {"wan": (1, 16, 1, 8, 8), "flux": (1, 16, 8, 8), "qwen": (1, 16, 1, 8, 8)}
Rounding = tuple[torch.Tensor, Format, torch.Tensor]
"""Rounded activations `(T, K)`, their format, and the steps of their groups."""
FEW = [{"tensor": 2}, {"cfg": 2, "tensor": 2}, {"ring": 2, "ulysses": 2, "tensor": 2}]
MORE = [
    {"data": 2}, {"cfg": 2}, {"ring": 2}, {"ulysses": 2}, {"data": 2, "tensor": 2}, {"ulysses": 2, "tensor": 2},
    {"ring": 2, "tensor": 2}, {"cfg": 2, "ring": 2, "ulysses": 2},
]  # fmt: skip


@pytest.mark.parametrize("table", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.full)])
@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
@pytest.mark.parametrize("family", LATENTS)
def test_ranks_equal_one_rank(family, quant, table):
    case = Case(model=f"random:{family}", quant=quant, latent=LATENTS[family], steps=2)
    [reference] = run_on_one([case])
    errors = {}
    for degrees in table:
        results = run_as_threads(degrees, lambda mesh: run_case(case, mesh, {}))
        errors[str(degrees)] = max(relative_error(result, reference) for result in results)
    print({degrees: f"{error:.1e}" for degrees, error in errors.items()})
    assert max(errors.values()) < FLIP_LIMIT
    assert min(errors.values()) < LIMIT


@pytest.mark.full
@pytest.mark.parametrize("row", ["uneven tokens", "batch 2"])
@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
@pytest.mark.parametrize("family", LATENTS)
def test_ranks_equal_one_rank_for_uneven_tokens_and_a_batch(family, quant, row):
    sizes = TABLE[row]
    batch, channels, height, width = sizes["latent"]
    video = () if family == "flux" else (1,)
    case = Case(
        model=f"random:{family}", quant=quant, steps=2, prompts=sizes.get("prompts", (5, 5)),
        latent=(batch, channels, *video, height, width),
    )  # fmt: skip
    [reference] = run_on_one([case])
    errors = {}
    for degrees in [*FEW, {"ring": 3}, {"ulysses": 2, "cfg": 2}, *([{"data": 2, "ring": 2}] if batch > 1 else [])]:
        results = run_as_threads(degrees, lambda mesh: run_case(case, mesh, {}))
        errors[str(degrees)] = max(relative_error(result, reference) for result in results)
    print({degrees: f"{error:.1e}" for degrees, error in errors.items()})
    assert max(errors.values()) < FLIP_LIMIT
    assert min(errors.values()) < LIMIT


def cuts_a_group(family: str, quant: str) -> bool:
    """Whether two tensor ranks would share a group of inputs of the tiny model, which is refused."""
    try:
        make_plan(
            ParallelSettings(devices="cpu:2", tensor=2), inspect_model(f"random:{family}", quant=quant), Machine()
        )
    except Refused:
        return True
    return False


@pytest.mark.full
@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_becomes_4_bit_as_it_is_loaded(family, quant):
    form = FAMILIES[family].latent
    latent = (1, form.channels, *([1] if form.dims == 3 else []), 8, 8)
    plain = Case(model=f"random:{family}", latent=latent, steps=1, cfg=1.0)
    case = replace(plain, quant=quant)
    [unquantised], [reference] = run_on_one([plain]), run_on_one([case])
    error = relative_error(reference, unquantised)
    axis = "ring" if cuts_a_group(family, quant) else "tensor"
    results = run_as_threads({axis: 2}, lambda mesh: run_case(case, mesh, {}))
    over_ranks = max(relative_error(result, reference) for result in results)
    print(f"{error:.2f} of the plain one, {over_ranks:.1e} of one rank")
    assert 0.01 < error < 0.3 and over_ranks < FLIP_LIMIT


def codes_that_differ(one: Rounding, other: Rounding, rank: int) -> int:
    """How many activations of a rank were rounded to another code than those of one rank, of which it has all or a slice."""
    (whole, form, steps), (values, _, _) = one, other
    width = values.shape[-1]
    own = slice(rank * width, (rank + 1) * width) if width < whole.shape[-1] else slice(width)
    groups = slice(own.start and own.start // form.group, own.stop // form.group)
    difference = (whole[..., own] - values).abs().unflatten(-1, (-1, form.group))
    return int((difference > 0.3 * steps[..., groups, None]).sum())


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 7))])
@pytest.mark.parametrize("family", ["wan", "qwen"])
def test_where_no_code_flips_ranks_are_as_exact_as_without_4_bits(family, seed, monkeypatch):
    """The codes of every 4-bit Linear in every step are compared, so that a larger error is known to be a flip's."""
    case = Case(model=f"random:{family}", quant="svdquant-int4", latent=LATENTS[family], steps=1, prompts=(4 + seed, 5))
    rounded: dict[str, list[Rounding]] = {}

    def record(x: torch.Tensor, form: Format) -> torch.Tensor:
        values = round_activations(x, form)
        width = int(values.flatten(0, -2).any(0).nonzero().max()) + 1  # without what it is filled up with
        width = -(-width // form.group) * form.group
        steps = x.unflatten(-1, (-1, form.group)).abs().amax(-1) / form.largest
        rounded.setdefault(current_thread().name, []).append((values[..., :width].clone(), form, steps))
        return values

    def run(mesh: Mesh) -> torch.Tensor:
        current_thread().name = f"rank {mesh.rank}"
        return run_case(case, mesh, {})

    monkeypatch.setattr(core, "round_activations", record)
    [reference] = run_on_one([case])
    [single] = rounded.values()
    rounded.clear()
    error = max(relative_error(result, reference) for result in run_as_threads({"tensor": 2}, run))
    flips = 0
    for rank in range(2):
        calls = rounded[f"rank {rank}"]
        assert len(calls) == len(single) >= 20
        flips += sum(codes_that_differ(*pair, rank) for pair in zip(single, calls, strict=True))
    print(f"{error:.1e} with {flips} other codes")
    assert error < (FLIP_LIMIT if flips else LIMIT)


def test_the_weights_are_in_4_bits_and_not_plain():
    case = Case(latent=LATENTS["wan"], steps=2)
    plain, four_bit = run_on_one([case, replace(case, quant="svdquant-int4")])
    assert relative_error(four_bit, plain) > 100 * LIMIT


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_plan_that_cuts_a_group_is_refused_with_the_nearest(family):
    facts = inspect_model(f"random:{family}", quant="svdquant-int4")
    with pytest.raises(Refused, match=r"within a group of 64.*nearest plan that works: devices cpu:4, .*tensor 2"):
        make_plan(ParallelSettings(devices="cpu:4", tensor=4), facts, Machine(), dtype="auto")
    assert make_plan(ParallelSettings(devices="cpu:2", tensor=2), facts, Machine(), dtype="auto").tensor == 2
