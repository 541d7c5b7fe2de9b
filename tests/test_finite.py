"""What is no longer numbers is told of with where it comes from, on every rank, and never a black picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import Refused
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import MemorySettings, ModelSettings
from runtime.tiny_shapes import MODEL_FOLDER
from tests.ranks import Case, run_as_threads, sample_request
from tests.test_fp8 import in_eight_bits, original_weights
from tests.test_fp8 import request as request_of

BAD = {"nan": float("nan"), "inf": float("inf"), "large": 1e5}
WEIGHT, NAME = "blocks.1.ffn.0.weight", "blocks.1.ffn.net.0.proj.weight of model.safetensors"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return original_weights()


def written(path: Path, weights: dict[str, torch.Tensor], value: float, *, eight_bits: bool = False) -> str:
    """A file with the last number of one weight set to a value."""
    tensors = in_eight_bits(weights, "marked") if eight_bits else {name: each.clone() for name, each in weights.items()}
    tensors[WEIGHT] = tensors[WEIGHT].clone()
    tensors[WEIGHT].view(torch.uint8 if eight_bits else torch.float32)[-1, -1] = 0x7F if eight_bits else value
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors")
    return str(path / "model.safetensors")


def refusal(model: str, mesh: Mesh | None = None, request=None, **settings) -> str:
    """What sampling says."""
    settings = ModelSettings(model=model, **settings)
    pipeline, steps = Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress), []
    with pytest.raises(Refused, match="not finite") as raised:
        pipeline.sample(request or request_of(), progress=lambda stage, step, total, **told: steps.append(step))
    assert set(steps) <= {0, 1}, "not at the first step"
    return str(raised.value)


@pytest.mark.parametrize(("value", "settings"), [("nan", {}), ("inf", {}), ("large", {"dtype": "fp16"})])
def test_a_weight_that_is_not_finite_is_named(weights, tmp_path, value, settings):
    said = refusal(written(tmp_path, weights, BAD[value]), **settings)
    assert f"{NAME} is so" in said and ("set dtype to bf16" in said) == bool(settings), said


def test_every_rank_names_it_whichever_has_it(weights, tmp_path):
    path = written(tmp_path, weights, BAD["nan"])
    for degrees in ({"tensor": 2}, {"cfg": 2, "ring": 2}):
        said = run_as_threads(degrees, lambda mesh: refusal(path, mesh))
        assert len(set(said)) == 1 and NAME in said[0], said


def test_a_weight_in_eight_bits_is_named_and_a_streamed_one_is_refused_without_its_name(weights, tmp_path):
    path = written(tmp_path, weights, 0.0, eight_bits=True)
    assert NAME in refusal(path)
    assert "the blocks of model.safetensors are streamed and were not looked at" in refusal(
        path, memory=MemorySettings(offload="disk", resident_blocks="0")
    )


def test_dpm_adaptive_ends_and_names_it_too(weights, tmp_path):
    request = sample_request(Case(sampler="dpm_adaptive"))
    assert NAME in refusal(written(tmp_path, weights, BAD["nan"]), request=request)


def test_what_is_lost_on_the_way_is_told_of_at_the_end():
    pipeline = Pipeline.load(ModelSettings(model="random:wan"), mesh=Mesh.single(), progress=ignore_progress)

    def spoil(stage, step, total, **told):
        if step == 2:
            pipeline.transformer.proj_out.bias.fill_(BAD["inf"])

    with pytest.raises(Refused, match=r"not finite .*proj_out\.bias of random:wan is so"):
        pipeline.sample(sample_request(Case()), progress=spoil)


def test_an_input_that_is_not_finite_is_named():
    request = sample_request(Case())
    bad = request.latent.clone()
    bad[0, 0, 0, 0, 0] = BAD["inf"]
    assert "latent_image has such numbers already" in refusal(
        "random:wan", request=request.model_copy(update={"latent": bad})
    )
    [entry] = request.negative
    entry = entry.model_copy(update={"embedding": entry.embedding * BAD["nan"]})
    assert "negative has such numbers already" in refusal(
        "random:wan", request=request.model_copy(update={"negative": (entry,)})
    )


def test_a_vae_and_a_latent_that_are_not_finite_are_refused(tmp_path):
    settings = ModelSettings(model="tiny-shapes")
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    with pytest.raises(Refused, match="the latent has numbers that are not finite"):
        pipeline.decode(torch.full((1, 16, 1, 8, 8), BAD["nan"]), progress=ignore_progress)
    with pytest.raises(Refused, match="the picture has numbers that are not finite"):
        pipeline.encode(torch.full((1, 64, 64, 3), BAD["inf"]), progress=ignore_progress)
    file = MODEL_FOLDER / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_in.weight"][0, 0] = BAD["nan"]
    (tmp_path / "config.json").write_bytes((file.parent / "config.json").read_bytes())
    save_file(tensors, tmp_path / file.name)
    pipeline = Pipeline.load(
        settings.model_copy(update={"vae": str(tmp_path)}), mesh=Mesh.single(), progress=ignore_progress
    )
    with pytest.raises(Refused, match=r"decoder\.conv_in\.weight has numbers that are not finite .*download it again"):
        pipeline.decode(torch.zeros(1, 16, 1, 8, 8), progress=ignore_progress)


def test_a_text_encoder_that_gives_no_numbers_is_refused():
    pipeline = Pipeline.load(ModelSettings(model="tiny-shapes"), mesh=Mesh.single(), progress=ignore_progress)
    pipeline.encode_text("a red circle", progress=ignore_progress)
    [model] = pipeline._components.text_encoder.model.values()
    with torch.inference_mode():
        next(model.parameters()).fill_(BAD["nan"])
    with pytest.raises(Refused, match="the text encoder UMT5 gave numbers that are not finite"):
        pipeline.encode_text("a blue circle", progress=ignore_progress)
