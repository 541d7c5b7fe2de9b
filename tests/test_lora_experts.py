"""Each of two experts has its own LoRAs, and a file that is on another than its name says is told of."""

from __future__ import annotations

import pytest
import torch

from runtime.errors import Refused
from runtime.lora.experts import _doubt
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import LoraSettings, ModelSettings
from tests.lora_files import Draw, kohya, write
from tests.ranks import Case, relative_error, run_as_threads, sample_request
from tests.test_experts import folder, pair

__all__ = ["folder"]
LAYERS = {"blocks.0.attn1.to_q": (128, 128), "blocks.1.ffn.net.2": (128, 256)}
BOUNDARY = 0.95


def load(model: ModelSettings, mesh: Mesh | None = None) -> Pipeline:
    return Pipeline.load(model, mesh=mesh or Mesh.single(), progress=ignore_progress)


def latent(pipeline: Pipeline) -> torch.Tensor:
    return pipeline.sample(sample_request(Case(steps=4)), progress=ignore_progress)


@pytest.fixture
def high(tmp_path) -> LoraSettings:
    return write(tmp_path / "style_high_noise.safetensors", kohya(LAYERS, Draw(1))).model_copy(
        update={"expert": "high noise"}
    )


@pytest.fixture
def low(tmp_path) -> LoraSettings:
    return write(tmp_path / "style_low_noise.safetensors", kohya(LAYERS, Draw(2)), -0.8).model_copy(
        update={"expert": "low noise"}
    )


@pytest.mark.parametrize("degrees", [{}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_each_expert_has_its_own(folder, high, low, degrees):
    """As a pair of which one file was put on each transformer by hand."""
    model = pair(folder, boundary=BOUNDARY)
    reference = load(model)
    plain = latent(reference)
    for expert, lora in zip(reference.experts, (high, low), strict=True):
        expert.loras.use([lora])
    expected = latent(reference)
    one = load(model)
    for lora in (high, low):
        one.use_loras([lora])
        assert relative_error(latent(one), expected) > 1e-4 and relative_error(latent(one), plain) > 1e-4

    def run(mesh: Mesh) -> float:
        pipeline = load(model.model_copy(update={"loras": (low, high)}), mesh)
        return relative_error(latent(pipeline), expected)

    assert max(run_as_threads(degrees, run) if degrees else [run(Mesh.single())]) < 2e-6


def test_reports_name_the_expert_and_a_name_that_says_otherwise(folder, high, low):
    pipeline = load(pair(folder))
    both = high.model_copy(update={"expert": "both"})
    assert pipeline.use_loras([both, low]) == (
        "high noise: style_high_noise.safetensors: 2 targets applied",
        "low noise: style_high_noise.safetensors: 2 targets applied",
        "low noise: style_low_noise.safetensors: 2 targets applied",
        "style_high_noise.safetensors is on both experts, but its name says high noise: choose that as expert",
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wan2.2_t2v_A14B_high_noise_lora", "high noise"), ("Wan22-LOW-rank64", "low noise"), ("HighNoise_style", "high noise"),
        ("highway_at_night", ""), ("slow_motion", ""), ("high_and_low", ""), ("glow", ""),
    ],
)  # fmt: skip
def test_names_that_say_an_expert(name, says):
    doubt = _doubt(LoraSettings(path=f"/loras/{name}.safetensors"))
    assert (says in doubt) if says else not doubt
    assert not says or not _doubt(LoraSettings(path=f"/loras/{name}.safetensors", expert=says))


def test_a_model_of_one_transformer_has_no_experts(high):
    with pytest.raises(Refused, match=r"style_high_noise.* no two experts: set expert to both"):
        load(ModelSettings(model="random:wan")).use_loras([high])


def test_when_one_expert_refuses_neither_changes(folder, high, tmp_path):
    pipeline = load(pair(folder))
    pipeline.use_loras([high])
    before = latent(pipeline)
    gone = LoraSettings(path=str(tmp_path / "gone.safetensors"), expert="low noise")
    with pytest.raises(Refused, match="no such LoRA"):
        pipeline.use_loras([gone])
    assert torch.equal(latent(pipeline), before)
