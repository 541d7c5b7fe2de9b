"""Two experts that take turns as one model: which of them runs, and that it is the same on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import build_transformer
from runtime.errors import Refused
from runtime.experts import inspect_settings
from runtime.families.wan import TINY, WAN
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.needs import Needs
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.sample_inputs import flow_table
from runtime.sampling import make_sigmas
from runtime.settings import MemorySettings, ModelSettings, SampleSettings
from tests.ranks import Case, relative_error, run_as_threads, sample_request

LIMIT = 2e-6
STEPS = 6
LATENT = (1, 16, 2, 6, 8)


def write_expert(folder: Path, *, seed: int) -> Path:
    """A tiny Wan with random weights, as a diffusers transformer folder."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    _, shapes = build_transformer(inspect_model("random:wan"))
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: tensor / tensor[0].numel() ** 0.5 if tensor.ndim > 1 else tensor for name, tensor in drawn.items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": WAN.transformer_class, **TINY}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder of both experts."""
    folder = tmp_path_factory.mktemp("pair")
    write_expert(folder / "transformer", seed=1)
    write_expert(folder / "transformer_2", seed=2)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", "boundary_ratio": 0.9}))
    return folder


def pair(folder: Path, **options: Any) -> ModelSettings:
    names = {"model": str(folder / "transformer"), "model_low_noise": str(folder / "transformer_2")}
    return ModelSettings(**{**names, **options})


def sampled(model: ModelSettings, mesh: Mesh | None = None, latent: torch.Tensor | None = None, **changes: Any):
    """The latent of a few steps; `changes` are of the sampler's settings."""
    request = sample_request(Case(latent=LATENT, steps=STEPS))
    settings = SampleSettings(**{**request.settings.model_dump(), **changes})
    given = request.latent if latent is None else latent
    pipeline = Pipeline.load(model, mesh=mesh or Mesh.single(), progress=ignore_progress)
    request = request.model_copy(update={"model": model, "settings": settings, "latent": given})
    return pipeline.sample(request, progress=ignore_progress)


def steps_of_high_noise(boundary: float) -> int:
    """How many steps begin at the boundary or above it."""
    table = flow_table(SampleSettings(), WAN, torch.Size(LATENT))
    sigmas = make_sigmas("simple", STEPS, table=table, sampler_name="euler", denoise=1.0)
    return int((sigmas[:-1] >= boundary).sum())


@pytest.mark.parametrize("boundary", [0.875, 0.95])
def test_a_pair_is_one_expert_for_the_steps_of_high_noise_and_then_the_other(folder, boundary):
    """As two samplers one after the other, with what noise is left handed on."""
    steps = steps_of_high_noise(boundary)
    assert 0 < steps < STEPS
    high, low = (ModelSettings(model=str(folder / name)) for name in ("transformer", "transformer_2"))
    begun = sampled(high, end_at_step=steps, leftover_noise=True)
    expected = sampled(low, latent=begun, start_at_step=steps, add_noise=False)
    both = sampled(pair(folder, boundary=boundary))
    assert relative_error(both, expected) < LIMIT
    assert relative_error(both, sampled(high)) > 1e-2 and relative_error(both, sampled(low)) > 1e-2


@pytest.mark.parametrize("degrees", [{"cfg": 2}, {"data": 2}, {"ring": 2}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_ranks_turn_to_the_same_expert(folder, degrees):
    alone = sampled(pair(folder))
    for result in run_as_threads(degrees, lambda mesh: sampled(pair(folder), mesh)):
        assert relative_error(result, alone) < LIMIT


def test_a_pair_is_the_same_with_its_blocks_in_host_memory(folder):
    offloaded = pair(folder, memory=MemorySettings(offload="layerwise", resident_blocks="0"))
    assert torch.equal(sampled(offloaded), sampled(pair(folder)))


def test_a_diffusers_folder_has_both_experts_and_their_boundary(folder):
    facts = inspect_settings(ModelSettings(model=str(folder)))
    assert [each.sources[0].path.parent.name for each in facts.experts] == ["transformer", "transformer_2"]
    assert facts.boundary == 0.9
    assert inspect_settings(pair(folder)).boundary == 0.875
    assert inspect_settings(ModelSettings(model=str(folder), boundary=0.5)).boundary == 0.5
    both, one = Needs(facts).bytes_per_rank(2), Needs(facts.low_noise).bytes_per_rank(2)
    assert both == 2 * one > 0
    assert torch.equal(sampled(ModelSettings(model=str(folder), boundary=0.875)), sampled(pair(folder)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"model": "random:qwen", "model_low_noise": "random:qwen"},
            r"comes as one model: leave model_low_noise empty",
        ),
        ({"model": "random:wan", "model_low_noise": "random:flux"}, r"Wan.*2 layers.*Flux\.1.*are no pair"),
        ({"model": "random:wan", "boundary": 0.9}, r"boundary 0\.9.*there is none: choose model_low_noise"),
    ],
)
def test_what_is_no_pair_is_refused(settings, words):
    with pytest.raises(Refused, match=words):
        inspect_settings(ModelSettings(**settings))


def test_the_same_expert_twice_is_refused(folder):
    with pytest.raises(Refused, match=r"are both transformer: choose the other"):
        inspect_settings(pair(folder, model_low_noise=str(folder / "transformer")))
