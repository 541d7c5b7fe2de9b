"""Files in 8 bits: their weights stay so, mean what ComfyUI takes them for, and give one latent on every plan."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import random_tensors
from runtime.footprint import bytes_per_rank
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.quant.fp8 import Fp8Core
from runtime.settings import MemorySettings, ModelSettings, SampleSettings
from runtime.tiny_shapes.export import to_comfy_transformer
from tests.ranks import relative_error, run_as_threads
from tests.stock import ask_comfyui
from tests.stock import relative_error as largest_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 256, "num_layers": 2, "text_dim": 4096,
    "freq_dim": 256, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
LAYOUTS = ("plain e4m3", "plain e5m2", "scaled", "marked")
PLANS = [{"tensor": 2}, {"ring": 2}, {"cfg": 2, "ulysses": 2}]


def original_weights() -> dict[str, torch.Tensor]:
    """A small Wan in the original names."""
    with torch.device("meta"):
        shapes = diffusers.WanTransformer3DModel(**CONFIG).state_dict()
    drawn = dict(random_tensors({name: tensor.shape for name, tensor in shapes.items()}))
    return to_comfy_transformer(drawn)


def in_eight_bits(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The tensors as such files have them: all of them rounded, or the matrices of blocks scaled and marked."""
    if layout.startswith("plain"):
        return {name: tensor.to(E5M2 if layout.endswith("e5m2") else E4M3) for name, tensor in tensors.items()}
    old, written = layout == "scaled", {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or tensor.ndim != 2:
            written[name] = tensor
            continue
        scale = tensor.abs().max() / torch.finfo(E4M3).max
        written[name] = (tensor / scale).to(E4M3)
        written[f"{layer}.{'scale_weight' if old else 'weight_scale'}"] = scale
        if not old:
            mark = json.dumps({"format": "float8_e4m3fn"}).encode()
            written[f"{layer}.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
    return {**written, "scaled_fp8": torch.tensor([], dtype=E4M3)} if old else written


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder, weights = tmp_path_factory.mktemp("files"), original_weights()
    paths = {layout: folder / f"{layout.replace(' ', '-')}.safetensors" for layout in LAYOUTS}
    for layout, path in paths.items():
        save_file({name: tensor.contiguous() for name, tensor in in_eight_bits(weights, layout).items()}, path)
    return paths


def load(model: Path | str, mesh: Mesh | None = None, **settings) -> Pipeline:
    settings = ModelSettings(model=str(model), **settings)
    return Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress)


def request(width: int = 4096) -> Sample:
    generator = torch.Generator().manual_seed(0)
    prompts = [Conditioning(embedding=torch.randn(1, length, width, generator=generator)) for length in (6, 4)]
    return Sample(
        job="fp8",
        model=ModelSettings(model="-"),
        settings=SampleSettings(seed=1, steps=3, cfg=3.0),
        positive=(prompts[0],),
        negative=(prompts[1],),
        latent=torch.zeros(1, 16, 1, 8, 10),
    )


def cores(pipeline: Pipeline) -> dict[str, Fp8Core]:
    return {name: module for name, module in pipeline._predict._model.named_modules() if type(module) is Fp8Core}


def test_weights_stay_in_eight_bits_and_mean_codes_times_scale(files):
    weights = original_weights()
    for layout in ("scaled", "marked"):
        held = cores(load(files[layout]))
        assert len(held) > 20
        core, original = held["blocks.1.ffn.net.0.proj.core"], weights["blocks.1.ffn.0.weight"]
        scale = original.abs().max() / torch.finfo(E4M3).max
        assert core.weight.dtype == E4M3 and core.weight_scale.dtype == torch.float32
        assert torch.equal(core.widened(torch.float32), (original / scale).to(E4M3).float() * scale)
    plain = load(files["plain e4m3"])
    held = cores(plain)["blocks.0.attn1.to_q.core"]
    assert torch.equal(held.widened(torch.float32), weights["blocks.0.self_attn.q.weight"].to(E4M3).float())
    assert plain._predict._model.blocks[0].norm2.weight.dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_plan_gives_the_latent_of_one_rank(layout, files):
    alone = load(files[layout]).sample(request(), progress=ignore_progress)
    for degrees in PLANS:
        for result in run_as_threads(
            degrees, lambda mesh: load(files[layout], mesh).sample(request(), progress=ignore_progress)
        ):
            assert relative_error(result, alone) < 2e-6
    streamed = load(files[layout], memory=MemorySettings(offload="layerwise", resident_blocks="0"))
    assert torch.equal(streamed.sample(request(), progress=ignore_progress), alone)


@pytest.mark.comfy
def test_latents_and_weights_are_comfyuis(files, tmp_path):
    """`scaled` alone is read by every version of ComfyUI beside the plain files; it multiplies that in 16 bits."""
    codes = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(E4M3)
    prompts = {side: entries[0].embedding for side, entries in (("p", request().positive), ("n", request().negative))}
    inputs = {**prompts, "latent": request().latent, "codes": codes, "scale": torch.tensor(0.0123)}
    widgets = {"seed": 1, "steps": 3, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    layouts = ("plain e4m3", "plain e5m2", "scaled")
    samples = [
        {"model": str(files[layout]), "latent": "latent", "positive": "p", "negative": "n", **widgets}
        for layout in layouts
    ]
    dtypes = ("float32", "bfloat16")
    stock = ask_comfyui(tmp_path, inputs=inputs, samples=samples, widened=[{"dtype": dtype} for dtype in dtypes])
    for number, layout in enumerate(layouts):
        error = largest_error(
            load(files[layout]).sample(request(), progress=ignore_progress), stock[f"samples.{number}"]
        )
        print(f"{layout}: relative error {error:.1e}")
        assert error < (2e-2 if layout == "scaled" else 1e-5)
    for number, dtype in enumerate(dtypes):
        assert torch.equal(codes.to(getattr(torch, dtype)).mul_(inputs["scale"]), stock[f"widened.{number}"])


@pytest.mark.parametrize("family", ["wan", "flux", "qwen"])
def test_a_plain_file_is_rounded_as_it_is_loaded(family):
    pipeline = load(f"random:{family}", quant="fp8")
    assert cores(pipeline) and all(core.weight.dtype == E4M3 for core in cores(pipeline).values())
    facts = [inspect_model(f"random:{family}", quant=quant) for quant in ("none", "fp8")]
    plain, rounded = (bytes_per_rank(each, dtype="fp32", tensor=1) for each in facts)
    assert rounded < 0.8 * plain
