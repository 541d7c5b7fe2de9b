"""Our engine's latent is that of stock KSampler over ComfyUI's own class, from one file in ComfyUI's names.

ComfyUI's loaders know most classes in their published sizes alone, so the class is built small, with random weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import ModelSettings, SampleSettings
from tests.ranks import run_as_threads
from tests.stock import ask_comfyui, relative_error

pytestmark = pytest.mark.comfy

LIMIT = 1e-4
AXES = [4, 14, 14]
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 32, "context_in_dim": 64,
    "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 4, "depth": 2, "depth_single_blocks": 2, "axes_dim": AXES,
    "theta": 10000, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "in_channels": 64, "out_channels": 16, "num_layers": 2, "attention_head_dim": 32,
    "num_attention_heads": 4, "joint_attention_dim": 64, "axes_dims_rope": AXES,
}  # fmt: skip
ZIMAGE = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 384, "n_layers": 2, "n_refiner_layers": 1,
    "n_heads": 4, "n_kv_heads": 4, "qk_norm": True, "cap_feat_dim": 64, "axes_dims": [24, 36, 36],
    "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True,
    "time_scale": 1000.0, "pad_tokens_multiple": 32,
}  # fmt: skip
FLUX2 = {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
    "context_in_dim": 64, "hidden_size": 128, "mlp_ratio": 3.0, "num_heads": 4, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [8, 8, 8, 8], "theta": 2000, "qkv_bias": False, "ops_bias": False, "global_modulation": True,
    "mlp_silu_act": True, "guidance_embed": True, "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
CHROMA = {
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "patch_size": 2, "context_in_dim": 64,
    "hidden_size": 64, "mlp_ratio": 4.0, "num_heads": 2, "depth": 28, "depth_single_blocks": 2, "axes_dim": AXES,
    "theta": 10000, "qkv_bias": True, "in_dim": 64, "out_dim": 64, "hidden_dim": 96, "n_layers": 2,
}  # fmt: skip
"""As many blocks as make the 344 modulations that ComfyUI counts on."""
SD3 = {
    "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 4, "num_blocks": 3, "input_size": None,
    "adm_in_channels": 32, "num_patches": 256, "pos_embed_max_size": 16, "pos_embed_scaling_factor": None, "qk_norm": "rms",
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 256}},
    "x_block_self_attn_layers": [0],
}  # fmt: skip
LUMINA2 = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 192, "n_layers": 2, "n_refiner_layers": 2,
    "n_heads": 12, "n_kv_heads": 4, "qk_norm": True, "cap_feat_dim": 64, "axes_dims": [8, 4, 4],
    "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
}  # fmt: skip
MODELS = {
    "flux": ("Flux", FLUX),
    "flux-schnell": ("FluxSchnell", {**FLUX, "guidance_embed": False}),
    "flux-fill": ("FluxInpaint", {**FLUX, "in_channels": 96}),
    "flux-control": ("Flux", {**FLUX, "in_channels": 32}),
    "qwen": ("QwenImage", QWEN),
    "zimage": ("ZImage", ZIMAGE),
    "flux2": ("Flux2", FLUX2),
    "flux2-klein": ("Flux2", {**FLUX2, "guidance_embed": False}),
    "chroma": ("Chroma", CHROMA),
    "sd3": ("SD3", SD3),
    "lumina2": ("Lumina2", LUMINA2),
    "sd3-medium": ("SD3", {**SD3, "qk_norm": None, "x_block_self_attn_layers": []}),
}
FAMILY_OF = {"flux2-klein": "flux2", "sd3-medium": "sd3"}
"""By our family, or what is named here: ComfyUI's class, and its configuration."""
REMADE = {"zimage": {"t_embedder": {"hidden_size": 1024, "output_size": 256}}}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INPUTS = {
    "a": draw(1, 7, 64, seed=1),
    "n": draw(1, 5, 64, seed=2),
    "long": draw(1, 39, 64, seed=9),
    "pooled": draw(1, 32, seed=3),
    "picture": draw(1, 16, 8, 12, seed=4),
    "odd": torch.zeros(1, 16, 5, 9),
    "batch": torch.zeros(2, 16, 6, 4),
    "reference": draw(1, 16, 10, 6, seed=5),
    "wide": draw(1, 16, 3, 11, seed=6),
    "tall": draw(1, 16, 13, 4, seed=7),
    "painted": (draw(1, 1, 64, 96, seed=8) > 0).float(),
    "empty": torch.zeros(1, 16, 8, 12),
    "wide picture": draw(1, 128, 4, 6, seed=10),
    "wide reference": draw(1, 128, 5, 3, seed=11),
}
INPUTS |= {f"{name}-5d": INPUTS[name].unsqueeze(2).clone() for name in ("reference", "wide", "tall")}
PROMPT = [["a", {"pooled_output": "pooled", "guidance": 2.5}]]
PLAIN = {
    "odd sides": {"latent": "odd"},
    "a batch": {"latent": "batch", "cfg": 1.0},
    "part": {"latent": "picture", "denoise": 0.6},
}


def with_options(**options: object) -> list:
    return [["a", {**PROMPT[0][1], **options}]]


def with_references(*names: str, method: str = "") -> dict:
    method = {"reference_latents_method": method} if method else {}
    return {"positive": with_options(reference_latents=list(names), **method)}


CASES = {
    **{(family, name): case for family in MODELS for name, case in PLAIN.items()},
    ("flux", "guidance by default"): {"positive": [["a", {"pooled_output": "pooled"}]]},
    ("flux", "one reference"): with_references("reference"),
    ("flux", "references side by side"): with_references("tall", "wide", "reference"),
    ("flux", "references by number"): with_references("tall", "wide", method="index"),
    ("flux", "references along the diagonal"): {"latent": "odd", **with_references("tall", "wide", method="uxo")},
    ("flux-fill", "a picture and a mask"): {"positive": with_options(concat_latent_image="picture", concat_mask="painted")},
    ("flux-fill", "a picture of another size"): {"positive": with_options(concat_latent_image="wide", concat_mask="painted")},
    ("flux-fill", "an area"): {
        "positive": [*with_options(concat_latent_image="picture", concat_mask="painted"), ["a", {"pooled_output": "pooled", "area": [6, 4, 2, 2]}]]
    },
    ("flux-control", "a picture"): {"positive": with_options(concat_latent_image="picture")},
    **{(family, "part"): {"latent": "wide picture", "denoise": 0.6} for family in ("flux2", "flux2-klein")},
    ("flux2", "one reference"): with_references("wide reference"),
    ("flux2", "references side by side"): with_references("wide reference", "wide picture", method="offset"),
    ("flux2", "references by number"): with_references("wide picture", "wide reference"),
    **{("chroma", name): {**case, "positive": [["a", {"pooled_output": "pooled"}]]} for name, case in PLAIN.items()},
    ("zimage", "a long prompt"): {"latent": "picture", "positive": [["long", {}]]},
    ("qwen", "one reference"): with_references("reference-5d"),
    ("qwen", "references larger than the picture"): {"latent": "odd", **with_references("tall-5d", "wide-5d", "reference-5d")},
}  # fmt: skip
"""What a case asks for beside what all do."""


def full(case: dict) -> dict:
    base = {"sampler_name": "euler", "scheduler": "simple", "cfg": 2.0, "denoise": 1.0, "seed": 3, "steps": 3}
    negative = [["n", {"pooled_output": "pooled"}]]
    return {**base, "latent": "empty", "positive": PROMPT, "negative": negative, **case}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def stock(folder) -> dict[tuple[str, str], torch.Tensor]:
    """ComfyUI's latents of all cases; the weights are in the folder afterwards."""
    for family, (kind, config) in MODELS.items():
        (folder / f"{family}.json").write_text(
            json.dumps({"class": kind, "unet_config": config, "remade": REMADE.get(family, {})})
        )
    samples = [{**full(case), "model": str(folder / f"{family}.json")} for (family, _), case in CASES.items()]
    results = ask_comfyui(folder, inputs=INPUTS, samples=samples)
    errors = [bytes(tensor.tolist()).decode() for name, tensor in results.items() if name.startswith("errors.")]
    assert not errors, errors
    return {name: results[f"samples.{number}"] for number, name in enumerate(CASES)}


def entry(name: str, options: dict) -> Conditioning:
    named = {"pooled_output": "pooled", "concat_latent_image": "concat_latent", "concat_mask": "concat_mask"}
    fields = {field: INPUTS[options[key]] for key, field in named.items() if key in options}
    references = tuple(INPUTS[each] for each in options.get("reference_latents", ()))
    area = {"area": tuple(options["area"])} if "area" in options else {}
    return Conditioning(
        embedding=INPUTS[name],
        guidance=options.get("guidance"),
        references=references,
        reference_method=options.get("reference_latents_method", ""),
        **fields,
        **area,
    )


def ours(path: Path, case: dict, mesh: Mesh) -> torch.Tensor:
    settings = ModelSettings(model=str(path), dtype="fp32")
    pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
    request = Sample(
        job="stock",
        model=settings,
        settings=SampleSettings(**{name: case[name] for name in SampleSettings.model_fields if name in case}),
        latent=INPUTS[case["latent"]].clone(),
        **{side: tuple(entry(*each) for each in case[side]) for side in ("positive", "negative")},
    )
    return pipeline.sample(request, progress=ignore_progress)


@pytest.mark.parametrize("name", CASES, ids=" ".join)
def test_latent_is_ksamplers_over_comfyuis_class(name, stock, folder):
    family, case = name[0], full(CASES[name])
    path = folder / f"{family}.safetensors"
    assert inspect_model(str(path)).family == FAMILY_OF.get(family, family)
    error = relative_error(ours(path, case, Mesh.single()), stock[name])
    print(f"relative error {error:.1e}")
    assert error < LIMIT


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in {(each, key) for each in MODELS for key in PLAIN}], ids=" ".join
)
@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"ring": 2, "ulysses": 2}], ids=str)
def test_the_same_over_ranks(name, degrees, stock, folder):
    """References and pictures are dealt with the other tokens, and fused layers are read in parts."""
    path, case = folder / f"{name[0]}.safetensors", full(CASES[name])
    alone = ours(path, case, Mesh.single())
    for result in run_as_threads(degrees, lambda mesh: ours(path, case, mesh)):
        assert relative_error(result, alone) < 1e-5
