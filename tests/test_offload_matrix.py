"""Every way of offload with every plan, number format and LoRA gives the latent of the resident model on one rank."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.bench.quant import quantize_settings
from runtime.checkpoint import random_tensors
from runtime.families import FAMILIES
from runtime.mesh import Mesh
from runtime.progress import ignore_progress
from runtime.quantize.job import quantize
from tests.lora_files import Draw, kohya
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_cases_as_processes, run_on_one
from tests.test_svdquant_ranks import FLIP_LIMIT

SAME = 2e-6
FAMILY_NAMES = ("wan", "flux")
LATENTS = {"wan": (1, 16, 1, 6, 8), "flux": (1, 16, 6, 8)}
LINEARS = {"wan": ("attn1.to_q", "ffn.net.0.proj"), "flux": ("attn.to_q", "attn.to_v")}
BLOCKS = {"wan": "blocks.{}", "flux": "transformer_blocks.{}"}
WAYS = {
    "off": {},
    "prefetch 1": {"offload": "layerwise", "resident_blocks": "0"},
    "prefetch 0.25": {"offload": "layerwise", "resident_blocks": "0", "prefetch": "0.25"},
    "2 resident": {"offload": "layerwise", "resident_blocks": "2"},
    "disk": {"offload": "disk", "resident_blocks": "0"},
    "gathered": {"offload": "layerwise", "resident_blocks": "0", "fetch": "gather"},
    "gathered from disk": {"offload": "disk", "resident_blocks": "0", "prefetch": "2", "fetch": "gather"},
}
PLANS = ({}, {"ulysses": 2}, {"tensor": 2}, {"cfg": 2, "ulysses": 2})
KINDS = ("plain", "fp8", "svdquant")


class Cell(NamedTuple):
    """One of the matrix."""

    way: str
    degrees: dict[str, int]
    kind: str
    lora: bool

    def __str__(self) -> str:
        plan = " ".join(f"{axis} {degree}" for axis, degree in self.degrees.items()) or "1 rank"
        return f"{self.way}, {plan}, {self.kind}{', LoRA' if self.lora else ''}"


SPREAD = (
    Cell("disk", {"ulysses": 2}, "fp8", False),
    Cell("2 resident", {"tensor": 2}, "fp8", True),
    Cell("prefetch 0.25", {"cfg": 2, "ulysses": 2}, "plain", True),
)
CELLS = [
    Cell(way, degrees, kind, lora)
    for degrees, way, kind, lora in product(PLANS, WAYS, KINDS, (False, True))
    if "ulysses" in degrees or "gather" not in way
]
"""Those of a plan one after the other: ranks form its mesh once."""


class Models:
    """A model of three layers with random weights, the same in 4 bits, and a LoRA for it."""

    def __init__(self, family: str, folder) -> None:
        self.family, self.folder = family, folder
        spec = FAMILIES[family]
        config = {**spec.tiny, "num_layers": 3}
        with torch.device("meta"):
            model = getattr(diffusers, spec.transformer_class)(**config)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        save_file(dict(random_tensors(shapes)), folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text(json.dumps({"_class_name": spec.transformer_class, **config}))
        names = [f"{BLOCKS[family].format(block)}.{linear}" for block in range(3) for linear in LINEARS[family]]
        layers = {name: tuple(shapes[f"{name}.weight"]) for name in names}
        save_file(kohya(layers, Draw(1), name=lambda layer: f"transformer.{layer}"), folder / "lora.safetensors")

    def pack(self) -> None:
        """Write the model in 4 bits."""
        few = {"prompts": ("a", "b"), "steps": 2, "tokens": 256, "rank": 16, "latent": LATENTS[self.family]}
        settings = quantize_settings(model=str(self.folder), **few)
        quantize(settings, self.folder / "packed.safetensors", progress=ignore_progress)

    def case(self, cell: Cell) -> Case:
        model = self.folder / "packed.safetensors" if cell.kind == "svdquant" else self.folder
        return Case(
            model=str(model),
            family=self.family,
            latent=LATENTS[self.family],
            steps=2,
            quant="fp8" if cell.kind == "fp8" else "none",
            degrees=cell.degrees,
            memory=WAYS[cell.way],
            loras=(str(self.folder / "lora.safetensors"),) if cell.lora else (),
        )


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def models(request, tmp_path_factory):
    return Models(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("cell", SPREAD, ids=str)
def test_a_cell_gives_the_latent_of_the_resident_model(cell, models):
    case = models.case(cell)
    [reference] = run_on_one([case])
    if cell.lora:
        [without] = run_on_one([replace(case, loras=())])
        assert relative_error(without, reference) > 1e-3
    run = run_as_threads(case.degrees, lambda mesh: run_case(case, mesh, {})) if case.degrees else None
    for latent in run or [run_case(case, Mesh.single(), {})]:
        assert relative_error(latent, reference) < SAME


def test_ranks_that_gather_blocks_give_the_latent_of_one(tmp_path):
    models = Models("wan", tmp_path)
    cells = [Cell("gathered", {"ulysses": 2}, "plain", False), Cell("gathered from disk", {"ulysses": 2}, "fp8", True)]
    cases = [models.case(cell) for cell in cells]
    found = run_cases_as_processes(cases, tmp_path)
    for reference, latents in zip(run_on_one(cases), found, strict=True):
        assert max(relative_error(latent, reference) for latent in latents) < SAME


@pytest.mark.full
def test_every_cell_gives_the_latent_of_the_resident_model(models, tmp_path_factory):
    """In 4 bits a last bit may decide how a number is rounded: those also equal the resident model of their own plan."""
    models.pack()
    cases = {str(cell): models.case(cell) for cell in CELLS}
    references = {str(cell): models.case(cell) for cell in CELLS if cell.way == "off" and not cell.degrees}
    found = dict(zip(references, run_on_one(list(references.values())), strict=True))
    one_rank = {str(cell): found[str(cell._replace(way="off", degrees={}))] for cell in CELLS}
    latents = {}
    for world in (1, 2, 4):
        part = {name: case for name, case in cases.items() if math.prod(case.degrees.values()) == world}
        found = run_cases_as_processes(list(part.values()), tmp_path_factory.mktemp("ranks")) if world > 1 else None
        latents |= zip(part, found or [[run_case(case, Mesh.single(), {})] for case in part.values()], strict=True)
    errors = {name: max(relative_error(each, one_rank[name]) for each in latents[name]) for name in cases}
    for kind in KINDS:
        of_kind = {name: error for name, error in errors.items() if f", {kind}" in name}
        worst = max(of_kind, key=of_kind.get)
        print(f"{models.family} {kind}: {len(of_kind)} cells, at most {of_kind[worst]:.1e} ({worst})")
    for cell in CELLS:
        assert errors[str(cell)] < (FLIP_LIMIT if cell.kind == "svdquant" else SAME)
        resident = latents[str(cell._replace(way="off"))]
        assert all(map(lambda found, wanted: relative_error(found, wanted) < SAME, latents[str(cell)], resident))
