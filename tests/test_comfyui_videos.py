"""Videos of pictures: what stock nodes make of them, sampled by stock KSampler over ComfyUI's own class, and by our engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.sample_inputs import flow_table
from runtime.sampling import make_sigmas
from runtime.settings import ModelSettings, SampleSettings
from tests.ranks import run_as_threads
from tests.stock import ask_comfyui, relative_error

pytestmark = pytest.mark.comfy

LIMIT = 1e-4
WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 256, "num_heads": 2, "num_layers": 2, "ffn_dim": 512,
    "text_dim": 64, "freq_dim": 64, "in_dim": 36, "out_dim": 16,
}  # fmt: skip
LTX = {
    "image_model": "ltxv",
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
    "caption_channels": 64,
    "num_layers": 2,
}
HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None,
    "axes_dim": [4, 14, 14], "context_in_dim": 64, "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 4, "depth": 2,
    "depth_single_blocks": 0, "theta": 256, "qkv_bias": True, "byt5": True, "meanflow": False, "guidance_embed": False,
    "use_cond_type_embedding": True, "vision_in_dim": 1280,
}  # fmt: skip
MODELS = {
    "i2v": ("wan-i2v", "WAN21_I2V", {**WAN, "model_type": "i2v"}),
    "flf2v": ("wan-i2v", "WAN21_I2V", {**WAN, "model_type": "i2v", "flf_pos_embed_token_number": 514}),
    "i2v 2.2": ("wan2.2-i2v", "WAN21_T2V", WAN),
    "high noise": ("wan", "WAN21_T2V", {**WAN, "in_dim": 16}),
    "low noise": ("wan", "WAN21_T2V", {**WAN, "in_dim": 16}),
    "ti2v": ("wan2.2-ti2v", "WAN22_T2V", {**WAN, "in_dim": 48, "out_dim": 48}),
    "ltx": ("ltx", "LTXV", LTX),
    "ltx 0.9.5": ("ltx-0.9.5", "LTXV", {**LTX, "causal_temporal_positioning": True}),
    "hunyuan 1.5": ("hunyuan-1.5", "HunyuanVideo15", HUNYUAN),
}
"""By name: our family, ComfyUI's class, and its configuration."""
WAN_21, WAN_22, LTX_VAE, HUNYUAN_VAE = (16, 8), (48, 16), (128, 32), (32, 16)
"""Channels of the VAE, and how far it scales down."""


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INPUTS = {
    "a": draw(1, 512, 64, seed=1),
    "n": draw(1, 512, 64, seed=2),
    "first": draw(1, 50, 70, 3, seed=3).sigmoid(),
    "words": draw(1, 7, 64, seed=7),
    "no words": draw(1, 7, 64, seed=9),
    "glyphs": draw(1, 4, 1472, seed=10),
    "mask of words": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
    "places": draw(1, 1, 2, 3, 5, seed=8).sigmoid(),
    "two frames": draw(2, 90, 60, 3, seed=4).sigmoid(),
    "empty": torch.zeros(1, 16, 2, 6, 8),
    "vision": draw(1, 257, 1280, seed=5),
    "vision of the last": draw(1, 257, 1280, seed=6),
}
WORDS = {"embedding": "words", "attention_mask": "mask of words", "frame_rate": 24.0}
SIZE = {"width": 96, "height": 80, "length": 9, "batch_size": 1}
ODD = {"width": 72, "height": 40, "length": 5, "batch_size": 2}
FIRST, BOTH = {"start_image": "first"}, {"start_image": "first", "end_image": "two frames"}
VISION = {"clip_vision_output": "vision"}
VISION_OF_BOTH = {"clip_vision_start_image": "vision", "clip_vision_end_image": "vision of the last"}
I2V, FLF2V, TI2V, LTX_I2V = "WanImageToVideo", "WanFirstLastFrameToVideo", "Wan22ImageToVideoLatent", "LTXVImgToVideo"
HUNYUAN_I2V = "HunyuanVideo15ImageToVideo"
VAES = {TI2V: WAN_22, LTX_I2V: LTX_VAE, HUNYUAN_I2V: HUNYUAN_VAE}
MODULES = {LTX_I2V: "comfy_extras.nodes_lt", HUNYUAN_I2V: "comfy_extras.nodes_hunyuan"}
IN_LATENT = (TI2V, LTX_I2V)
"""Nodes that put the picture into the latent, with a noise mask."""
QUOTED = {"embedding": "words", "conditioning_byt5small": "glyphs"}
WIDE = {"width": 160, "height": 96, "length": 9, "batch_size": 1}
CASES = {
    ("i2v", "a picture that CLIP vision saw"): {"node": I2V, "images": FIRST, "vision": VISION},
    ("i2v", "odd sides, two frames, a batch"): {"node": I2V, "images": {"start_image": "two frames"}, "vision": VISION, "widgets": ODD},
    ("i2v", "no CLIP vision"): {"node": I2V, "images": FIRST},
    ("i2v", "no picture"): {"node": I2V, "vision": VISION},
    ("i2v", "an area"): {"node": I2V, "images": FIRST, "vision": VISION, "area": [6, 4, 2, 2]},
    ("i2v", "the first and the last frame"): {"node": FLF2V, "images": BOTH, "vision": VISION_OF_BOTH},
    ("flf2v", "the first and the last frame"): {"node": FLF2V, "images": BOTH, "vision": VISION_OF_BOTH},
    ("flf2v", "CLIP vision of the first alone"): {"node": FLF2V, "images": BOTH, "vision": {"clip_vision_start_image": "vision"}},
    ("i2v 2.2", "a picture"): {"node": I2V, "images": FIRST},
    ("i2v 2.2", "the first and the last frame"): {"node": FLF2V, "images": BOTH, "widgets": ODD},
    ("ti2v", "a first frame"): {"node": TI2V, "images": FIRST},
    ("ti2v", "a first frame, noise between steps"): {"node": TI2V, "images": FIRST, "sampler_name": "euler_ancestral"},
    ("ltx", "a first frame"): {"node": LTX_I2V, "images": {"image": "first"}, "widgets": {**WIDE, "strength": 0.8}, "prompt": WORDS},
    ("ltx 0.9.5", "a first frame, a batch"): {"node": LTX_I2V, "images": {"image": "first"}, "widgets": {**WIDE, "strength": 1.0, "batch_size": 2}, "prompt": WORDS},
    ("ltx 0.9.5", "a mask of places"): {"node": LTX_I2V, "images": {"image": "first"}, "widgets": {**WIDE, "strength": 1.0}, "prompt": {**WORDS, "frame_rate": None}, "noise_mask": "places"},
    ("hunyuan 1.5", "a picture that CLIP vision saw, words in quotation marks"): {"node": HUNYUAN_I2V, "images": FIRST, "vision": VISION, "prompt": QUOTED},
    ("hunyuan 1.5", "two frames, a batch, an area"): {"node": HUNYUAN_I2V, "images": {"start_image": "two frames"}, "widgets": ODD, "prompt": {"embedding": "words"}, "area": [2, 2, 0, 1]},
    ("hunyuan 1.5", "a picture, of which a part is painted anew"): {"node": HUNYUAN_I2V, "images": FIRST, "prompt": {"embedding": "words"}, "noise_mask": "places"},
    ("hunyuan 1.5", "a prompt alone"): {"node": HUNYUAN_I2V, "prompt": {"embedding": "words"}},
    ("ti2v", "a prompt alone"): {"node": TI2V, "widgets": {**ODD, "width": 144, "height": 112}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def widgets(case: dict) -> dict:
    names = {"sampler_name": "euler", "scheduler": "simple", "cfg": 2.0, "denoise": 1.0, "seed": 3, "steps": 3}
    return {name: case.get(name, value) for name, value in names.items()}


@pytest.fixture(scope="module")
def stock(folder) -> dict[str, torch.Tensor]:
    """What ComfyUI's nodes make, and the latents of its KSampler; the weights are in the folder afterwards."""
    for number, (name, (_, kind, config)) in enumerate(MODELS.items()):
        metadata = {"config": json.dumps({"transformer": config})}
        described = {"class": kind, "unet_config": config, "seed": number, "metadata": metadata}
        (folder / f"{name}.json").write_text(json.dumps(described))
    videos, samples = [], []
    for number, ((model, _), case) in enumerate(CASES.items()):
        vae, module = VAES.get(case["node"], WAN_21), MODULES.get(case["node"], "comfy_extras.nodes_wan")
        videos.append({"widgets": SIZE, "vae": vae, "module": module, **case})
        samples.append({**widgets(case), "model": str(folder / f"{model}.json"), **sockets(number, case)})
    samples += two_samplers(folder, number=len(samples))
    results = ask_comfyui(folder, inputs=INPUTS, videos=videos, samples=samples)
    errors = [bytes(tensor.tolist()).decode() for name, tensor in results.items() if name.startswith("errors.")]
    assert not errors, errors
    return results


PAIR = {"positive": [["a", {}]], "negative": [["n", {}]], "steps": 6}


def two_samplers(folder: Path, *, number: int) -> list[dict]:
    """KSamplerAdvanced over the expert of high noise, then another over the one of low noise; `number` is the first's."""
    table = flow_table(SampleSettings(), FAMILIES["wan"], INPUTS["empty"].shape)
    sigmas = make_sigmas("simple", PAIR["steps"], table=table, sampler_name="euler")
    steps = int((sigmas[:-1] >= FAMILIES["wan"].boundary).sum())
    turns = {"high noise": ["enable", 0, steps, "enable"], "low noise": ["disable", steps, 10000, "disable"]}
    latents = ("empty", f"samples.{number}")
    return [
        {**widgets(PAIR), **PAIR, "model": str(folder / f"{name}.json"), "latent": latent, "advanced": advanced}
        for (name, advanced), latent in zip(turns.items(), latents, strict=True)
    ]


def sockets(number: int, case: dict) -> dict:
    """Positive, negative and latent of a case, by the names of what its node made."""
    keys = []
    if case.get("images") and case["node"] not in IN_LATENT:
        keys += ["concat_latent_image", "concat_mask"]
    if case.get("vision"):
        keys += ["clip_vision_output"]
    prompt = {"embedding": "a", **case.get("prompt", {})}
    options = {key: f"videos.{number}.{key}" for key in keys} | {
        k: v for k, v in prompt.items() if v and k != "embedding"
    }
    options |= {"pooled_output": None} if case["node"] == HUNYUAN_I2V else {}
    positive = [[prompt["embedding"], options]]
    positive += [[prompt["embedding"], {**options, "area": case["area"]}]] if "area" in case else []
    negative = {"a": "n", "words": "no words"}[prompt["embedding"]]
    mask = case.get("noise_mask", f"videos.{number}.noise_mask")
    is_masked = "noise_mask" in case or (case["node"] in IN_LATENT and case.get("images"))
    masked = {"noise_mask": mask} if is_masked else {}
    latent = {"latent": f"videos.{number}.samples"}
    return {"positive": positive, "negative": [[negative, options]], **latent, **masked}


def entry(name: str, options: dict, made: dict[str, torch.Tensor]) -> Conditioning:
    named = {"concat_latent_image": "concat_latent", "conditioning_byt5small": "second_embedding"}
    named |= {name: name for name in ("concat_mask", "attention_mask")}
    fields = {field: (INPUTS | made)[options[key]] for key, field in named.items() if key in options}
    if "clip_vision_output" in options:
        fields |= dict.fromkeys(("clip_vision", "clip_vision_last"), (INPUTS | made)[options["clip_vision_output"]])
    area = {"area": tuple(options["area"])} if "area" in options else {}
    return Conditioning(embedding=INPUTS[name], frame_rate=options.get("frame_rate"), **fields, **area)


def ours(name: tuple[str, str], folder: Path, made: dict[str, torch.Tensor], mesh: Mesh) -> torch.Tensor:
    case, number = CASES[name], list(CASES).index(name)
    settings = ModelSettings(model=str(folder / f"{name[0]}.safetensors"), dtype="fp32")
    pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
    plugs = sockets(number, case)
    request = Sample(
        job="stock",
        model=settings,
        settings=SampleSettings(**widgets(case)),
        latent=made[plugs["latent"]].clone(),
        noise_mask=(INPUTS | made)[plugs["noise_mask"]] if "noise_mask" in plugs else None,
        cpu_noise_offset=int(made["step_seed_offset"]),
        **{side: tuple(entry(*each, made) for each in plugs[side]) for side in ("positive", "negative")},
    )
    return pipeline.sample(request, progress=ignore_progress)


@pytest.mark.parametrize("name", CASES, ids=" ".join)
def test_latent_is_ksamplers_over_comfyuis_class(name, stock, folder):
    assert inspect_model(str(folder / f"{name[0]}.safetensors")).family == MODELS[name[0]][0]
    error = relative_error(ours(name, folder, stock, Mesh.single()), stock[f"samples.{list(CASES).index(name)}"])
    print(f"relative error {error:.1e}")
    assert error < LIMIT


def test_a_pair_of_experts_gives_what_two_stock_samplers_give(stock, folder):
    paths = {name: str(folder / f"{name}.safetensors") for name in ("high noise", "low noise")}
    settings = ModelSettings(model=paths["high noise"], model_low_noise=paths["low noise"], dtype="fp32")
    prompts = {side: tuple(entry(*each, stock) for each in PAIR[side]) for side in ("positive", "negative")}
    widgets_ = SampleSettings(**widgets(PAIR))
    request = Sample(job="stock", model=settings, settings=widgets_, latent=INPUTS["empty"], **prompts)
    latent = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress).sample(
        request, progress=ignore_progress
    )
    error = relative_error(latent, stock[f"samples.{len(CASES) + 1}"])
    print(f"relative error {error:.1e}")
    assert error < LIMIT


FEW = [
    ("i2v", "an area"),
    ("flf2v", "CLIP vision of the first alone"),
    ("ti2v", "a first frame"),
    ("ltx 0.9.5", "a mask of places"),
    ("hunyuan 1.5", "a picture that CLIP vision saw, words in quotation marks"),
]
PLACES = [(name, {"tensor": 2}) for name in FEW]
MORE = [(name, degrees) for name in CASES for degrees in ({"tensor": 2}, {"ring": 2, "ulysses": 2})]


@pytest.mark.parametrize(
    ("name", "degrees"), [*PLACES, *(pytest.param(*more, marks=pytest.mark.full) for more in MORE)], ids=str
)
def test_the_same_over_ranks(name, degrees, stock, folder):
    alone = ours(name, folder, stock, Mesh.single())
    for result in run_as_threads(degrees, lambda mesh: ours(name, folder, stock, mesh)):
        assert relative_error(result, alone) < 1e-5
