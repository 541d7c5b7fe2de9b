"""What LoRA files call a layer, and which of our layers that is; layers that a file has fused are split to ours."""

from __future__ import annotations

import pytest
import torch

from runtime.checkpoint import build_transformer
from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.families.hunyuan import HUNYUAN15, REFINERS
from runtime.families.wan import WAN
from runtime.inspection import inspect_model
from runtime.lora.formats import split_key, summary
from runtime.lora.names import LayerNames
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from runtime.tiny_shapes.export import to_comfy_transformer
from tests.lora_files import Draw, added, dora, dotted, flat, kohya, loha, lokr, weights_of, write

SHAPES, FLUX_SHAPES = (build_transformer(inspect_model(f"random:{family}"))[1] for family in ("wan", "flux"))


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_blocks_1_self_attn_q",
        "lora_unet__blocks_1_self_attn_q",
        "diffusion_model.blocks.1.self_attn.q",
        "model.diffusion_model.blocks.1.self_attn.q",
        "blocks.1.self_attn.q",
        "transformer.blocks.1.attn1.to_q",
        "base_model.model.blocks.1.attn1.to_q",
        "base_model.model.transformer.blocks.1.attn1.to_q",
        "lycoris_blocks_1_attn1_to_q",
        "lora_transformer_blocks_1_attn1_to_q",
    ],
)
def test_every_way_to_write_a_layer_is_the_same_layer(name):
    [target] = LayerNames(WAN, SHAPES).find(name)
    assert target.name == "blocks.1.attn1.to_q.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_of_every_family_is_found_by_diffusers_names(family):
    names = LayerNames(FAMILIES[family], build_transformer(inspect_model(f"random:{family}"))[1])
    layers = [
        name.removesuffix(".weight")
        for name, shape in names.shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    ]
    assert len(layers) > 20
    for layer in layers:
        for prefix in ("", "transformer.", "base_model.model.", "diffusion_model."):
            assert [target.name for target in names.find(prefix + layer)] == [f"{layer}.weight"]
        for prefix in ("lora_unet_", "lycoris_", "lora_transformer_"):
            assert [target.name for target in names.find(prefix + layer.replace(".", "_"))] == [f"{layer}.weight"]


def test_every_layer_is_found_by_its_flat_original_name():
    """For each weight of the model, from the names of a checkpoint in the original layout."""
    names = {name: torch.tensor(number) for number, name in enumerate(SHAPES)}
    original, layers = to_comfy_transformer(names), LayerNames(WAN, SHAPES)
    weights = [name for name in original if name.endswith(".weight")]
    assert len(weights) == 37
    for name in weights:
        [target] = layers.find("lora_unet_" + name.removesuffix(".weight").replace(".", "_"))
        assert torch.equal(names[target.name], original[name])


@pytest.mark.parametrize(
    ("layer", "own"),
    [
        ("double_blocks.1.img_attn.qkv", [f"transformer_blocks.1.attn.to_{each}" for each in "qkv"]),
        ("double_blocks.1.txt_attn.qkv", [f"transformer_blocks.1.attn.add_{each}_proj" for each in "qkv"]),
        ("double_blocks.1.img_attn_q", ["transformer_blocks.1.attn.to_q"]),
        ("double_blocks.1.txt_attn_v", ["transformer_blocks.1.attn.add_v_proj"]),
        ("double_blocks.1.img_attn_proj", ["transformer_blocks.1.attn.to_out.0"]),
        ("double_blocks.1.txt_attn.proj", ["transformer_blocks.1.attn.to_add_out"]),
        ("double_blocks.1.img_mod.linear", ["transformer_blocks.1.norm1.linear"]),
        ("double_blocks.1.txt_mod.lin", ["transformer_blocks.1.norm1_context.linear"]),
        ("double_blocks.1.txt_mlp.fc1", ["transformer_blocks.1.ff_context.net.0.proj"]),
        ("double_blocks.1.img_mlp.2", ["transformer_blocks.1.ff.net.2"]),
        ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv", [f"{REFINERS}.0.attn.to_{each}" for each in "qkv"]),
        ("txt_in.individual_token_refiner.blocks.0.self_attn_proj", [f"{REFINERS}.0.attn.to_out.0"]),
        ("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1", [f"{REFINERS}.0.norm_out.linear"]),
        ("txt_in.t_embedder.mlp.2", ["context_embedder.time_text_embed.timestep_embedder.linear_2"]),
        ("txt_in.c_embedder.in_layer", ["context_embedder.time_text_embed.text_embedder.linear_1"]),
        ("time_in.mlp.0", ["time_embed.timestep_embedder.linear_1"]),
        ("vision_in.proj.3", ["image_embedder.linear_2"]),
        ("byt5_in.fc2", ["context_embedder_2.linear_2"]),
        ("final_layer.adaLN_modulation.1", ["norm_out.linear"]),
    ],
)
def test_hunyuan_videos_layers_are_found_by_comfyuis_names_and_the_authors(layer, own):
    """Which have query, key and value apart in its blocks, and in one in the refiners of the text."""
    names = LayerNames(HUNYUAN15, build_transformer(inspect_model("random:hunyuan-1.5"))[1])
    for prefix in ("diffusion_model.", "transformer."):
        assert [target.name for target in names.find(prefix + layer)] == [f"{each}.weight" for each in own]


def test_a_layer_that_is_missing_hides_none_of_its_kind():
    """Of a block that a smaller model has not, or of another family with a similar name."""
    names = LayerNames(WAN, SHAPES)
    for missing, there in (
        ("blocks_35_self_attn_q", "blocks_1_self_attn_q"), ("blocks_1_ffn_1", "blocks_1_ffn_2"), ("head_0", "head_head"),
    ):  # fmt: skip
        assert names.find(f"lora_unet_{missing}") == ()
        assert len(names.find(f"lora_unet_{there}")) == 1


QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
FLUX_LAYERS = {
    "double_blocks.1.img_attn.qkv": [f"transformer_blocks.1.{layer}" for layer in QKV],
    "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{name}_proj" for name in "qkv"],
    "double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
    "double_blocks.0.txt_attn.proj": ["transformer_blocks.0.attn.to_add_out"],
    "double_blocks.0.img_mod.lin": ["transformer_blocks.0.norm1.linear"],
    "double_blocks.1.txt_mod.lin": ["transformer_blocks.1.norm1_context.linear"],
    "double_blocks.0.img_mlp.0": ["transformer_blocks.0.ff.net.0.proj"],
    "double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.net.2"],
    "single_blocks.1.linear1": [f"single_transformer_blocks.1.{layer}" for layer in (*QKV, "proj_mlp")],
    "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
    "single_blocks.0.modulation.lin": ["single_transformer_blocks.0.norm.linear"],
    "final_layer.linear": ["proj_out"],
    "vector_in.out_layer": ["time_text_embed.text_embedder.linear_2"],
    "guidance_in.in_layer": ["time_text_embed.guidance_embedder.linear_1"],
    "img_in": ["x_embedder"],
}
"""Black Forest Labs' layers, and what diffusers made of them."""


def xlabs(layer: str) -> str:
    """What xlabs' LoRAs call a layer."""
    names = {
        "img_attn.qkv": "processor.qkv_lora1", "txt_attn.qkv": "processor.qkv_lora2", "linear1": "processor.qkv_lora",
        "img_attn.proj": "processor.proj_lora1", "txt_attn.proj": "processor.proj_lora2", "linear2": "processor.proj_lora",
    }  # fmt: skip
    return next(layer.replace(own, theirs) for own, theirs in names.items() if layer.endswith(own))


def changed_weights(layers: dict[str, torch.Tensor], parts: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """What should be added to each layer of the class, for additions to the original layers."""
    return {
        part: rows
        for layer, added_to in layers.items()
        for part, rows in zip(
            parts[layer], added_to.split([FLUX_SHAPES[f"{part}.weight"][0] for part in parts[layer]]), strict=True
        )
    }


@pytest.mark.parametrize("layout", ["kohya", "PEFT", "xlabs"])
def test_layers_that_flux_fuses_are_split_to_ours(layout, tmp_path):
    parts = dict(FLUX_LAYERS)
    if layout == "xlabs":
        parts = {layer: parts[layer][:3] for layer in parts if layer.startswith(("double", "single"))}
        parts = {
            layer: each
            for layer, each in parts.items()
            if layer.rsplit(".", 1)[1] in ("qkv", "proj", "linear1", "linear2")
        }
    shapes = {
        layer: (sum(FLUX_SHAPES[f"{part}.weight"][0] for part in each), FLUX_SHAPES[f"{each[0]}.weight"][1])
        for layer, each in parts.items()
    }
    draw, tensors = Draw(1), {}
    drawn = {layer: (draw(4, shape[1]), draw(shape[0], 4)) for layer, shape in shapes.items()}
    for layer, (down, up) in drawn.items():
        name, a, b = {
            "kohya": ("lora_unet_" + layer.replace(".", "_"), "lora_down", "lora_up"),
            "PEFT": (dotted(layer), "lora_A", "lora_B"),
            "xlabs": (xlabs(layer) if layout == "xlabs" else "", "down", "up"),
        }[layout]
        tensors |= {f"{name}.{a}.weight": down, f"{name}.{b}.weight": up}
    pipeline = Pipeline.load(ModelSettings(model="random:flux"), mesh=Mesh.single(), progress=ignore_progress)
    [report] = pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors, 0.5)])
    expected = changed_weights({layer: 0.5 * up @ down for layer, (down, up) in drawn.items()}, parts)
    assert report == f"lora.safetensors: {len(expected)} targets applied"
    for layer, added_to in expected.items():
        [pair] = pipeline.transformer.get_submodule(layer).pairs
        assert torch.allclose(pair.scale * pair.up @ pair.down, added_to, atol=1e-7), layer


def test_flux_has_the_shift_of_its_last_layer_behind_the_scale(tmp_path):
    """From Black Forest Labs' order, (shift, scale), to diffusers', (scale, shift)."""
    down, up = Draw(1)(4, 128), Draw(2)(256, 4)
    name = "lora_unet_final_layer_adaLN_modulation_1"
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.diff_b": torch.arange(256.0)}
    pipeline = Pipeline.load(ModelSettings(model="random:flux"), mesh=Mesh.single(), progress=ignore_progress)
    before = pipeline.transformer.norm_out.linear.bias.clone()
    pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors)])
    linear = pipeline.transformer.norm_out.linear
    shift, scale = (up @ down).chunk(2)
    assert torch.allclose(linear.pairs[0].up @ linear.pairs[0].down, torch.cat([scale, shift]), atol=1e-7)
    assert torch.allclose(linear.bias - before, torch.arange(256.0).roll(128), atol=1e-4)


def test_columns_of_a_layer_in_another_order_are_brought_to_their_length(tmp_path):
    name = "final_layer.adaLN_modulation.1"
    tensors = dora({name: (256, 128)}, Draw(1), by_row=False)
    pipeline = Pipeline.load(ModelSettings(model="random:flux"), mesh=Mesh.single(), progress=ignore_progress)
    weight = torch.cat(pipeline.transformer.norm_out.linear.weight.double().chunk(2)[::-1])
    changed = weight + added(tensors, name)
    changed = changed * tensors[f"{flat(name)}.dora_scale"] / changed.norm(dim=0, keepdim=True)
    pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors)])
    found = torch.cat(pipeline.transformer.norm_out.linear.weight.chunk(2)[::-1])
    assert torch.allclose(found, changed.float(), atol=1e-6)


def test_columns_of_several_layers_in_one_are_refused_by_name(tmp_path):
    tensors = dora({"double_blocks.0.img_attn.qkv": (384, 128)}, Draw(1), by_row=False)
    pipeline = Pipeline.load(ModelSettings(model="random:flux"), mesh=Mesh.single(), progress=ignore_progress)
    with pytest.raises(
        Refused, match=r"lora.safetensors cannot be split for transformer_blocks.0.attn.to_q.weight: .* columns"
    ):
        pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors)])


@pytest.mark.parametrize(
    ("family", "way"), [("flux2", "LoraLoader behind the CLIP Loader"), ("wan", "connect a strength_clip")]
)
def test_a_file_for_text_alone_is_told_where_it_belongs(family, way, tmp_path):
    tensors = kohya({"layer": (8, 8)}, Draw(1), name=lambda layer: f"lora_te1_{layer}")
    pipeline = Pipeline.load(ModelSettings(model=f"random:{family}"), mesh=Mesh.single(), progress=ignore_progress)
    with pytest.raises(Refused, match=f"changes a text encoder alone: .*{way}"):
        pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors)])


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora"])
def test_other_kinds_are_split_like_their_full_matrix(kind, tmp_path):
    layer = {"double_blocks.0.img_attn.qkv": (384, 128)}
    tensors = {
        "loha": lambda: loha(layer, Draw(1), rank=2),
        "lokr": lambda: lokr(layer, Draw(1), low=""),
        "dora": lambda: dora(layer, Draw(1), by_row=True),
    }[kind]()
    pipeline = Pipeline.load(ModelSettings(model="random:flux"), mesh=Mesh.single(), progress=ignore_progress)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    parts = [f"transformer_blocks.0.{part}" for part in QKV]
    full = torch.cat([weights_of(pipeline)[f"{part}.weight"] for part in parts]).double()
    get = {role: tensor.double() for key, tensor in tensors.items() for role in [key.removeprefix(f"{name}.")]}
    if kind == "loha":
        changed = full + 3 / 2 * (get["hada_w1_a"] @ get["hada_w1_b"]) * (get["hada_w2_a"] @ get["hada_w2_b"])
    elif kind == "lokr":
        changed = full + torch.kron(get["lokr_w1"], get["lokr_w2"])
    else:
        changed = full + 3 / 4 * get["lora_up.weight"] @ get["lora_down.weight"]
        changed = changed * get["dora_scale"] / full.norm(dim=1, keepdim=True)
    pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors)])
    for part, expected in zip(parts, changed.chunk(3), strict=True):
        layer = pipeline.transformer.get_submodule(part)
        weight = weights_of(pipeline)[f"{part}.weight"]
        for pair in getattr(layer, "pairs", ()):
            weight = weight + pair.scale * pair.up @ pair.down
        assert torch.allclose(weight, expected.float(), atol=1e-6), part


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a.0.lora_down.weight", ("a.0", "down")),
        ("a.0.lora_B.default.weight", ("a.0", "up")),
        ("a.to_q_lora.up.weight", ("a.to_q", "up")),
        ("double_blocks.0.processor.qkv_lora1.down.weight", ("double_blocks.0.processor.qkv_lora1", "down")),
        ("a.diff_b", ("a", "bias difference")),
        ("a.dora_scale", ("a", "magnitude")),
        ("a.lora_magnitude_vector.default.weight", ("a", "magnitude_of_sum")),
        ("a.diff_m", None),
        ("blocks.0.weight", None),
    ],
)
def test_a_key_is_a_layer_and_a_role(key, expected):
    assert split_key(key) == expected


def test_keys_that_differ_in_their_block_are_told_in_one():
    assert summary(["b.0.x", "b.1.x", "b.10.x", "c.0.x", "d"]) == "b.*.x (3), c.0.x, d"
