"""What each family does with a file and with a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import build_transformer, random_tensors
from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.families.spec import FamilySpec
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import ModelSettings
from tests.ranks import Case, reads_mask, relative_error, sample_request

MASKED = [name for name, family in FAMILIES.items() if reads_mask(family)]


def random_file(family: FamilySpec, path: Path) -> Path:
    """The weights of `random:FAMILY` under diffusers' names."""
    _, shapes = build_transformer(inspect_model(f"random:{family.name}"))
    save_file({name: tensor.contiguous() for name, tensor in random_tensors(shapes)}, path)
    return path


def sample(request: Sample) -> torch.Tensor:
    pipeline = Pipeline.load(request.model, mesh=Mesh.single(), progress=ignore_progress)
    return pipeline.sample(request, progress=ignore_progress)


@pytest.mark.parametrize("name", ["qwen", "zimage", "flux2", "chroma", "sd3", "lumina2", "hunyuan-1.5"])
def test_a_file_gives_the_configuration_it_was_made_with(name, tmp_path):
    family = FAMILIES[name]
    facts = inspect_model(str(random_file(family, tmp_path / "model.safetensors")))
    assert facts.family == name
    assert {key: facts.config[key] for key in family.tiny} == dict(family.tiny)


@pytest.mark.parametrize("name", ["ltx", "ltx-0.9.5"])
def test_models_of_the_same_tensors_are_told_apart_by_the_pipeline_of_their_folder(name, tmp_path):
    family = FAMILIES[name]
    (tmp_path / "transformer").mkdir()
    random_file(family, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": family.transformer_class, **family.tiny}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": family.pipeline_classes[0]}))
    assert inspect_model(str(tmp_path)).family == name


def with_masks(request: Sample, *masks: torch.Tensor | None, length: int | None = None) -> Sample:
    """A request whose prompts have these masks, and only their first tokens."""
    changed = [
        entry.model_copy(update={"attention_mask": mask, "embedding": entry.embedding[:, :length]})
        for (entry,), mask in zip((request.positive, request.negative), masks, strict=True)
    ]
    return request.model_copy(update={"positive": (changed[0],), "negative": (changed[1],)})


@pytest.mark.parametrize("name", MASKED)
def test_padding_of_a_prompt_changes_nothing_where_a_mask_leaves_it_out(name):
    request = sample_request(Case(model=f"random:{name}", prompts=(7, 7), latent=(1, 16, 1, 6, 10)))
    words = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    masked, cut, whole = (
        sample(with_masks(request, *masks, length=length))
        for masks, length in (((words, words), None), ((None, None), 4), ((None, None), None))
    )
    assert relative_error(masked, cut) < 2e-6
    assert relative_error(masked, whole) > 1e-3
    assert torch.equal(sample(with_masks(request, torch.ones_like(words), None)), whole)


def test_a_model_in_half_the_bits_takes_what_its_class_works_out_in_all_of_them():
    """HunyuanVideo 1.5 hands on the waves of a timestep in the format of the timestep."""
    request = sample_request(Case(model="random:hunyuan-1.5", latent=(1, 32, 1, 4, 6), steps=2))
    half = request.model_copy(update={"model": ModelSettings(model="random:hunyuan-1.5", dtype="bf16")})
    assert relative_error(sample(half), sample(request)) < 0.02


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_is_added_to_attention_is_refused(name):
    request = sample_request(Case(model=f"random:{name}"))
    with pytest.raises(Refused, match=r"mask of a prompt is torch\.float32"):
        sample(with_masks(request, torch.zeros(1, 5), None))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "wan",
            {"references": (torch.zeros(1, 16, 1, 4, 4),)},
            r"reference latents \(1\).*takes none: remove Reference Latent",
        ),
        ("wan", {"clip_vision": torch.zeros(1, 257, 1280)}, r"CLIP Vision Encode.*does not read it: disconnect"),
        (
            "wan-i2v",
            {"clip_vision": torch.zeros(1, 257, 1280)},
            r"has shape \(1, 257, 1280\).*takes \(batch, tokens, 48\)",
        ),
        ("wan-i2v", {"embedding": torch.zeros(1, 600, 64)}, r"has 600 tokens, but Wan 2\.1 image to video takes 512"),
        ("wan-i2v", {"concat_latent": torch.zeros(1, 16, 3, 8, 8)}, r"has 3 frames, but the latent has 1"),
        ("wan2.2-i2v", {"concat_mask": torch.zeros(1, 1, 3, 8, 8)}, r"concat_mask.*\(1, 1, 3, 8, 8\)"),
        ("wan", {"second_embedding": torch.zeros(1, 3, 1472)}, r"ByT5 says, but Wan .* does not read it"),
        (
            "hunyuan-1.5",
            {"second_embedding": torch.zeros(1, 3, 1472)},
            r"shape \(1, 3, 1472\).*takes \(batch, tokens, 24\)",
        ),
        (
            "hunyuan-1.5",
            {"clip_vision": torch.zeros(1, 9, 48), "clip_vision_last": None},
            r"without the layer that HunyuanVideo 1\.5 reads",
        ),
        ("ltx", {"frame_rate": 0.0}, r"frame_rate of 0: set more than 0"),
        ("qwen", {"references": (torch.zeros(1, 16, 1, 4, 4),), "reference_method": "uxo"}, r"'uxo'.*there are: index"),
        ("qwen", {"references": (torch.zeros(1, 4, 4, 4),)}, r"a reference latent has shape \(1, 4, 1, 4, 4\)"),
        ("zimage", {"references": (torch.zeros(1, 16, 4, 4),)}, r"Z-Image takes none: remove Reference Latent"),
        ("chroma", {"guidance": 3.5}, r"carries guidance 3\.5: Chroma .* remove FluxGuidance"),
        ("chroma", {"references": (torch.zeros(1, 16, 4, 4),)}, r"Chroma takes none: remove Reference Latent"),
        ("flux-fill", {"references": (torch.zeros(1, 16, 4, 4),)}, r"Fill takes none: remove Reference Latent"),
        ("flux-control", {"references": (torch.zeros(1, 16, 4, 4),)}, r"Depth takes none: remove Reference Latent"),
        ("flux2", {"references": (torch.zeros(1, 16, 4, 4),)}, r"Flux\.2 dev or klein works on 128 channels"),
        ("flux", {"concat_latent": torch.zeros(1, 16, 4, 4)}, r"takes none: use the inpainting"),
        ("flux-fill", {"concat_latent": torch.zeros(1, 4, 4, 4)}, r"the picture beside the latent has shape \(1, 4"),
    ],
)
def test_what_a_family_cannot_take_is_refused_by_name(name, options, words):
    request = sample_request(Case(model=f"random:{name}", latent=(1, 16, 8, 8)))
    with pytest.raises(Refused, match=words):
        sample(request.model_copy(update={"positive": (request.positive[0].model_copy(update=options),)}))


def test_a_prompt_of_another_model_is_refused_by_width():
    request = sample_request(Case(model="random:qwen"))
    other = (Conditioning(embedding=torch.zeros(1, 5, 4096)),)
    with pytest.raises(Refused, match=r"\(1, 5, 4096\).*Qwen-Image"):
        sample(request.model_copy(update={"model": ModelSettings(model="random:qwen"), "positive": other}))
