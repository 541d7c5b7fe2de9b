"""LoRA files of every layout: our latents, and those of stock ComfyUI's LoraLoaderModelOnly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import build_transformer
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.lora.names import LayerNames
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import LoraSettings, ModelSettings, SampleSettings
from runtime.tiny_shapes.export import to_comfy_transformer
from tests.lora_files import Draw, cast, differences, dora, dotted, flat, kohya, loha, lokr, pairs, peft
from tests.stock import ask_comfyui, relative_error

pytestmark = pytest.mark.comfy

LIMIT = 1e-4
CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 256, "num_layers": 2, "text_dim": 4096,
    "freq_dim": 256, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
"""Wan's smallest that stock ComfyUI recognises: it takes a head for 128 wide."""
STRENGTHS = (-1.0, 0.5, 1.3)
SAMPLE = {
    "seed": 5, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
    "batch_index": None, "latent": "latent", "positive": "positive", "negative": "negative",
}  # fmt: skip
BLOCK_LAYERS = ("self_attn.q", "self_attn.k", "self_attn.o", "cross_attn.k", "cross_attn.v", "ffn.0", "ffn.2")
OTHER_LAYERS = ("time_embedding.0", "time_projection.1", "text_embedding.2", "head.head")


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INPUTS = {
    "latent": torch.zeros(1, 16, 1, 6, 8),
    "positive": draw(1, 9, 4096, seed=2),
    "negative": draw(1, 5, 4096, seed=3),
}


def wan_fun(layer: str) -> str:
    return flat(layer).replace("lora_unet_", "lora_unet__")


def formats(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, torch.Tensor]]:
    """A file of each layout that ComfyUI takes for Wan, for a checkpoint of these shapes in the original names."""
    in_blocks = [f"blocks.{block}.{layer}" for block in range(2) for layer in BLOCK_LAYERS]
    layers = {layer: shapes[f"{layer}.weight"] for layer in (*in_blocks, *OTHER_LAYERS)}
    square = {layer: shapes[f"{layer}.weight"] for layer in in_blocks}
    tensors = partial(differences, shapes, Draw(8))
    written = partial(pairs, layers, Draw(2), name=dotted)
    norms = [f"blocks.{block}.{norm}.weight" for block in range(2) for norm in ("norm3", "self_attn.norm_q")]
    biases = [f"{layer}.bias" for layer in layers]
    extracted = {
        **kohya(layers, Draw(3), alpha=False, name=dotted),
        **tensors(norms, key="diffusion_model.{}.diff"),
        **tensors(biases, key="diffusion_model.{}.diff_b"),
        **{f"diffusion_model.blocks.{block}.diff_m": draw(1, 6, 256, seed=4) for block in range(2)},
    }
    return {
        "kohya": kohya(layers, Draw(1)),
        "kohya without alpha": kohya(layers, Draw(1), alpha=False),
        "kohya bf16": cast(kohya(layers, Draw(1)), torch.bfloat16),
        "kohya fp16": cast(kohya(layers, Draw(1)), torch.float16),
        "kohya, a convolution": kohya({"patch_embedding": shapes["patch_embedding.weight"]}, Draw(1)),
        "Wan Fun": kohya(layers, Draw(1), name=wan_fun),
        "original names": kohya(layers, Draw(1), name=dotted),
        "PEFT": peft(layers, Draw(2)),
        "PEFT named adapter": peft(layers, Draw(2), adapter=".default"),
        "PEFT without weight": written(down=".lora_A", up=".lora_B"),
        "diffusers": written(down=".lora.down.weight", up=".lora.up.weight"),
        "diffusers processor": written(down="_lora.down.weight", up="_lora.up.weight"),
        "transformers": written(down=".lora_linear_layer.down.weight", up=".lora_linear_layer.up.weight"),
        "DoRA by row": dora(layers, Draw(4), by_row=True),
        "DoRA by column": dora(layers, Draw(4), by_row=False),
        "LoHa": loha(square, Draw(5), rank=4),
        "LoHa of high rank": loha(square, Draw(5), rank=16),
        "LoKr": lokr(square, Draw(6), low="2"),
        "LoKr of full factors": lokr(square, Draw(6), low=""),
        "LoKr of low-rank factors": lokr(square, Draw(6), low="12"),
        "LoKr, first factor low": lokr(square, Draw(6), low="1"),
        "extracted": extracted,
        "differences": tensors([f"{layer}.weight" for layer in layers], key="diffusion_model.{}.diff"),
        "differences of norms": {
            **tensors(norms, key="diffusion_model.{}.w_norm", spread=0.5),
            **tensors([f"blocks.{block}.norm3.bias" for block in range(2)], key="diffusion_model.{}.b_norm"),
        },
        "differences of parameters": {
            **tensors(["blocks.0.modulation", "head.modulation"], key="diffusion_model.{}.diff"),
            **tensors(norms, key="diffusion_model.{}.diff", spread=0.5),
        },
        "values": tensors([f"{layer}.weight" for layer in square], key="diffusion_model.{}.set_weight"),
    }


@dataclass(frozen=True)
class Setup:
    """One checkpoint on both sides, and a file of each layout."""

    checkpoint: Path
    pipeline: Pipeline
    files: dict[str, Path]


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    folder = tmp_path_factory.mktemp("lora")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = to_comfy_transformer(diffusers.WanTransformer3DModel(**CONFIG).state_dict())
    checkpoint = folder / "wan.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, checkpoint)
    files = {}
    for name, tensors in formats({name: tuple(tensor.shape) for name, tensor in weights.items()}).items():
        files[name] = folder / f"{name.replace(' ', '_')}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, files[name])
    settings = ModelSettings(model=str(checkpoint), dtype="fp32")
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    return Setup(checkpoint, pipeline, files)


def sampled(setup: Setup, loras: list[tuple[str, float]], **widgets: Any) -> torch.Tensor:
    """Our latent with LoRAs of these layouts and strengths, and other widgets than `SAMPLE`."""
    setup.pipeline.use_loras([LoraSettings(path=str(setup.files[name]), strength=strength) for name, strength in loras])
    widgets = SAMPLE | widgets
    request = Sample(
        job="lora",
        model=ModelSettings(model=str(setup.checkpoint), dtype="fp32"),
        settings=SampleSettings(
            **{name: value for name, value in widgets.items() if name in SampleSettings.model_fields}
        ),
        positive=(Conditioning(embedding=INPUTS["positive"]),),
        negative=(Conditioning(embedding=INPUTS["negative"]),),
        latent=INPUTS["latent"].clone(),
    )
    return setup.pipeline.sample(request, progress=ignore_progress)


STACKS = [
    [("kohya", 0.7), ("PEFT", -0.4)],
    [("DoRA by row", 0.6), ("kohya", 1.0)],
    [("kohya", 1.0), ("DoRA by row", 0.6)],
    [("PEFT", 0.5), ("LoKr of full factors", 0.8), ("extracted", 1.0)],
    [("extracted", 0.5), ("DoRA by column", 1.2), ("LoHa", 0.3)],
    [("kohya", 0.5), ("kohya", 0.5)],
]


FAST = [("extracted", 1.0)]
FEW_STEPS = [
    {"steps": 4, "cfg": 1.0, "shift": shift, "scheduler": name} for shift, name in ((5.0, "simple"), (8.0, "beta"))
]
"""How distilled LoRAs (lightx2v, Lightning) are run, and in their layout."""


@pytest.fixture(scope="module")
def both(setup, tmp_path_factory):
    """Our latent and ComfyUI's for each case, from one run of ComfyUI."""
    stacks = [[case] for case in product(setup.files, STRENGTHS)] + STACKS + [[]]
    cases = [(stack, {}) for stack in stacks] + [(FAST, widgets) for widgets in FEW_STEPS]
    samples = [
        SAMPLE | widgets | {"model": str(setup.checkpoint), "loras": [(str(setup.files[name]), s) for name, s in stack]}
        for stack, widgets in cases
    ]
    table = {"table": "flux_to_diffusers", "config": {"depth": 2, "depth_single_blocks": 2, "hidden_size": 128}}
    stock = ask_comfyui(tmp_path_factory.mktemp("stock"), inputs=INPUTS, samples=samples, layers=[table])
    return {"flux": json.loads(bytes(stock["layers.0"].tolist()))} | {
        key(stack, widgets): (sampled(setup, stack, **widgets), stock[f"samples.{number}"])
        for number, (stack, widgets) in enumerate(cases)
    }


def key(stack: list[tuple[str, float]], widgets: dict[str, Any]) -> str:
    return f"{stack} {widgets or ''}".rstrip()


def test_every_layout_at_every_strength_gives_comfyuis_latent(setup, both, capsys):
    plain = both["[]"][1]
    errors = {name: [relative_error(*both[str([(name, strength)])]) for strength in STRENGTHS] for name in setup.files}
    moved = {name: relative_error(both[str([(name, 1.3)])][1], plain) for name in setup.files}
    with capsys.disabled():
        for name, found in errors.items():
            print(
                f"\n  {name}: " + ", ".join(f"{error:.1e}" for error in found) + f" (moved by {moved[name]:.2f})",
                end="",
            )
    assert not {name: error for name, found in errors.items() if not (error := max(found)) < LIMIT}
    assert not {name: size for name, size in moved.items() if size < 100 * LIMIT}, "too little to be seen"


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_stacked_loras_give_comfyuis_latent(stack, both, capsys):
    error = relative_error(*both[str(stack)])
    with capsys.disabled():
        print(f"\n  {stack}: {error:.1e}", end="")
    assert error < LIMIT


@pytest.mark.parametrize("widgets", FEW_STEPS, ids=str)
def test_distilled_loras_give_comfyuis_latent_in_their_few_steps(widgets, both, capsys):
    error = relative_error(*both[key(FAST, widgets)])
    with capsys.disabled():
        print(f"\n  {widgets}: {error:.1e}", end="")
    assert error < LIMIT


def test_the_layers_of_flux_lie_where_comfyuis_own_table_has_them(both):
    """A LoRA for stock Flux in diffusers' names changes these rows of the original layers; ours is the way back."""
    names = LayerNames(FAMILIES["flux"], build_transformer(inspect_model("random:flux"))[1])
    seen = 0
    for name, (original, rows, swapped) in both["flux"].items():
        if name not in names.shapes or not original.endswith(".weight"):
            continue
        found = {
            target.name: target.rows for target in names.find(f"diffusion_model.{original.removesuffix('.weight')}")
        }
        half = names.shapes[name][0] // 2
        expected = () if rows is None else (slice(rows[1], rows[1] + rows[2]),)
        assert found[name] == ((slice(half, 2 * half), slice(0, half)) if swapped else expected), name
        seen += 1
    assert seen == sum(name.endswith(".weight") and "norm_" not in name for name in names.shapes) + 1


def test_without_loras_the_latent_is_again_that_of_the_model(setup, both):
    ours, plain = both["[]"]
    assert relative_error(ours, plain) < 1e-5
    fresh = Pipeline.load(
        ModelSettings(model=str(setup.checkpoint), dtype="fp32"), mesh=Mesh.single(), progress=ignore_progress
    )
    untouched = sampled(Setup(setup.checkpoint, fresh, {}), [])
    assert torch.equal(ours, untouched), "something of a LoRA stayed"
