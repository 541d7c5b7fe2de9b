"""A model in 4 bits over ranks is the model in 4 bits on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from runtime.bench.quant import quantize_settings
from runtime.comparison import FOUR_BIT_TOLERANCE
from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.machine import Machine
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.plan import make_plan
from runtime.progress import ignore_progress
from runtime.quantize.job import quantize
from runtime.settings import ModelSettings, ParallelSettings
from tests.lora_files import Draw, kohya
from tests.ranks import TABLE, Case, family_case, relative_error, run_as_threads, run_case, run_on_one, sample_request
from tests.rounding import SAME_INPUT, Roundings
from tests.test_experts import write_expert

LIMIT = 2e-6
FLIP_LIMIT = 0.1
"""Sums in another order differ in their last bit. Where that decides how one activation is rounded, it goes a whole step
another way, which later layers and guidance make more of: 0.062 at most in these cases, where 4 bits themselves cost 0.3.
"""
FAMILY_FLIP_LIMIT = FOUR_BIT_TOLERANCE
"""What `verify` allows. One flip of 3.8 million codes gave 0.11 in the tiny Flux.2, where 4 bits cost 0.28, and 0.11 in the
two experts of Wan 2.2, in four steps.
"""
LATENTS = {"wan": (1, 16, 1, 8, 8), "flux": (1, 16, 8, 8), "qwen": (1, 16, 1, 8, 8)}
Run = Callable[[Mesh], torch.Tensor]
FEW = [{"tensor": 2}, {"cfg": 2, "tensor": 2}, {"ring": 2, "ulysses": 2, "tensor": 2}]
MORE = [
    {"data": 2}, {"cfg": 2}, {"ring": 2}, {"ulysses": 2}, {"data": 2, "tensor": 2}, {"ulysses": 2, "tensor": 2},
    {"ring": 2, "tensor": 2}, {"cfg": 2, "ring": 2, "ulysses": 2},
]  # fmt: skip


class Errors(NamedTuple):
    """The error of ranks, how many codes flipped in them, and the error of the same ranks with the codes of one rank."""

    error: float
    flips: int
    same_codes: float | None = None

    def right(self, limit: float) -> bool:
        """Whether flips explain all of it that is more than other sums, and it is less than a limit."""
        return self.error < limit and self.same_codes < LIMIT if self.flips else self.error < LIMIT

    def __str__(self) -> str:
        return f"{self.error:.1e}" + (f" ({self.flips} flips, else {self.same_codes:.1e})" if self.flips else "")


def of_case(case: Case) -> Run:
    """A case on the ranks of any mesh."""
    return lambda mesh: run_case(case, mesh, {})


def on_one_rank(run: Run) -> tuple[torch.Tensor, Roundings]:
    """The latent of a run, and how its activations were rounded."""
    roundings = Roundings()
    with roundings.kept():
        return run(Mesh.single()), roundings


def errors_over_ranks(run: Run, degrees: dict[str, int], reference: torch.Tensor, roundings: Roundings) -> Errors:
    """What ranks differ by from one rank, of which there are the latent and the codes."""

    def error() -> float:
        return max(relative_error(found, reference) for found in run_as_threads(degrees, run))

    with roundings.compared():
        errors = Errors(error(), roundings.flips)
    assert roundings.activations
    if not errors.flips:
        return errors
    with roundings.compared(same_codes=True):
        errors = errors._replace(same_codes=error())
    assert roundings.farthest < SAME_INPUT  # or what ranks do wrong would be rounded to what is right
    return errors


def check_over_ranks(run: Run, table: Sequence[dict[str, int]], *, limit: float = FLIP_LIMIT) -> None:
    """Ranks are as exact as without 4 bits, but for codes that flip."""
    one_rank = on_one_rank(run)
    found = {str(degrees): errors_over_ranks(run, degrees, *one_rank) for degrees in table}
    print(shown(found))
    assert all(errors.right(limit) for errors in found.values())


def shown(found: dict[str, Errors]) -> str:
    """The figures of many runs."""
    return ", ".join(f"{name} {errors}" for name, errors in found.items())


@pytest.mark.parametrize("table", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.full)])
@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
@pytest.mark.parametrize("family", LATENTS)
def test_ranks_equal_one_rank(family, quant, table):
    case = Case(model=f"random:{family}", quant=quant, latent=LATENTS[family], steps=2)
    check_over_ranks(of_case(case), table)


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
    check_over_ranks(
        of_case(case), [*FEW, {"ring": 3}, {"ulysses": 2, "cfg": 2}, *([{"data": 2, "ring": 2}] if batch > 1 else [])]
    )


def cuts_a_group(family: str, quant: str) -> bool:
    """Whether two tensor ranks would share a group of inputs of the tiny model, which is refused by name. A file's own
    widths do not say: they are filled up.
    """
    try:
        facts = inspect_model(f"random:{family}", quant=quant)
        make_plan(ParallelSettings(devices="cpu:2", tensor=2), facts, Machine(), dtype="auto")
    except Refused as refusal:
        assert "within a group of" in str(refusal)
        return True
    return False


def lora_for(case: Case, folder: Path) -> str:
    """The path of a LoRA for the first and the last 4-bit Linear of a model."""
    stored = inspect_model(case.model, quant=case.quant).stored
    names = [name for name, each in stored.items() if each.kind.startswith("svdquant")]
    shapes = inspect_model(f"random:{case.family}").shapes  # those of a file are filled up
    layers = {name: shapes[f"{name}.weight"] for name in (names[0], names[-1])}
    save_file(kohya(layers, Draw(1), name=lambda layer: f"transformer.{layer}"), folder / "lora.safetensors")
    return str(folder / "lora.safetensors")


@pytest.mark.full
@pytest.mark.parametrize("made", ["as it is loaded", "by quantize"])
@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_4_bits_is_the_same_over_every_kind(family, quant, made, tmp_path):
    """With and without a LoRA and blocks in host memory; a tensor degree that cuts a group of inputs is refused."""
    case = family_case(family, quant=quant)
    if made == "by quantize":
        path = tmp_path / f"{family}.safetensors"
        few = {"prompts": ("a", "b"), "steps": 2, "tokens": 256, "rank": 16, "latent": case.latent}
        quantize(quantize_settings(model=case.model, kind=quant, **few), path, progress=ignore_progress)
        case = replace(case, model=str(path), quant="none")
    with_lora = replace(case, loras=(lora_for(case, tmp_path),))
    streamed = replace(with_lora, memory={"offload": "layerwise", "resident_blocks": "0"})
    [plain] = run_on_one([family_case(family)])
    one_rank = {"": (case, *on_one_rank(of_case(case))), " LoRA": (streamed, *on_one_rank(of_case(with_lora)))}
    [reference, changed] = (latent for _, latent, _ in one_rank.values())
    loss, seen = relative_error(reference, plain), relative_error(changed, reference)
    found = {}
    for axis in ("ulysses", "ring", "tensor", "cfg"):
        if axis == "tensor" and cuts_a_group(family, quant):
            continue
        for name, (each, *one) in one_rank.items():
            found[axis + name] = errors_over_ranks(of_case(each), {axis: 2}, *one)
    print(f"FAMILY {family} {quant} {made}: {loss:.2f} of the plain one, LoRA {seen:.2f}; {shown(found)}")
    assert 0.01 < loss < 0.6 and seen > 1e-3
    assert all(errors.right(FAMILY_FLIP_LIMIT) for errors in found.values())


@pytest.mark.full
@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
def test_two_experts_that_quantize_made_run_as_one_over_ranks(quant, tmp_path):
    names = {}
    for seed, role in enumerate(("model", "model_low_noise"), start=1):
        names[role] = str(tmp_path / f"{role}.safetensors")
        settings = quantize_settings(
            model=str(write_expert(tmp_path / role, seed=seed)), kind=quant, latent=LATENTS["wan"], steps=2, tokens=256,
            prompts=("a", "b"),
        )  # fmt: skip
        quantize(settings, Path(names[role]), progress=ignore_progress)

    def sampled(mesh: Mesh) -> torch.Tensor:
        settings = ModelSettings(**names, boundary=0.9)
        pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
        request = sample_request(Case(steps=4, latent=LATENTS["wan"]))
        return pipeline.sample(request.model_copy(update={"model": settings}), progress=ignore_progress)

    check_over_ranks(sampled, [{axis: 2} for axis in ("ulysses", "ring", "tensor", "cfg")], limit=FAMILY_FLIP_LIMIT)


FLIPS = [("wan", {"tensor": 2}, "no mask", 1), ("qwen", {"tensor": 2}, "no mask", 1)]
MORE_FLIPS = [
    *product(("wan", "qwen"), ({"tensor": 2},), ("no mask",), range(2, 7)),
    *product(("wan", "qwen"), ({"ulysses": 2}, {"ring": 2}, {"tensor": 2}), ("uneven tokens", "batch 2"), (1, 2)),
]


@pytest.mark.parametrize(
    ("family", "degrees", "row", "seed"),
    [*FLIPS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_FLIPS)],
)
def test_where_no_code_flips_ranks_are_as_exact_as_without_4_bits(family, degrees, row, seed):
    """Every activation is compared with that of one rank, so that a larger error is known to be a flip's."""
    batch, channels, *sides = TABLE[row]["latent"]
    case = Case(
        model=f"random:{family}",
        quant="svdquant-int4",
        latent=(batch, channels, 1, *sides),
        steps=1,
        prompts=(4 + seed, 5),
    )
    check_over_ranks(of_case(case), [degrees])


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
