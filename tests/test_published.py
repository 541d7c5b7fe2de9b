"""The checkpoints that are published: names and shapes alone tell family and configuration, or why a model is not run.

The headers are data in `tests/published`, of two layouts: what diffusers' classes and ComfyUI's have with the published
configurations. The files have no weights in them. `python -m tests.record_published` records what is added here.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import diffusers
import pytest
import torch

from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from tests.published_keys import LAYOUTS, read_keys, write_file

WAN = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40, "out_channels": 16}
WAN_I2V = {**WAN, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
LTX_13B = {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48}
WAN_5B = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
FLUX = {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "guidance_embeds": True}
QWEN = {"num_layers": 60, "num_attention_heads": 24, "in_channels": 64, "out_channels": 16}
SD3_MEDIUM = ("sd3", "SD3Transformer2DModel", {
    "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192})  # fmt: skip
HUNYUAN15 = ("hunyuan-1.5", "HunyuanVideo15Transformer3DModel", {})
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Wan 2.1 T2V 1.3B": ("wan", "WanTransformer3DModel", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}),
    "Wan 2.1 T2V 14B": ("wan", "WanTransformer3DModel", WAN),
    "Wan 2.2 T2V A14B, either expert": ("wan", "WanTransformer3DModel", WAN),
    "Wan 2.1 I2V 14B": ("wan-i2v", "WanTransformer3DModel", WAN_I2V),
    "Wan 2.1 FLF2V 14B": ("wan-i2v", "WanTransformer3DModel", {**WAN_I2V, "pos_embed_seq_len": 514}),
    "Wan 2.1 Fun InP 1.3B": ("wan-i2v", "WanTransformer3DModel", {
        **WAN_I2V, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "added_kv_proj_dim": 1536}),
    "Wan 2.2 I2V A14B, either expert": ("wan2.2-i2v", "WanTransformer3DModel", {**WAN, "in_channels": 36}),
    "LTX-Video 0.9, 2B": ("ltx", "LTXVideoTransformer3DModel", {}),
    "LTX-Video 0.9.7, 13B": ("ltx", "LTXVideoTransformer3DModel", LTX_13B),
    "Wan 2.2 TI2V 5B": ("wan2.2-ti2v", "WanTransformer3DModel", WAN_5B),
    "Flux.1 dev": ("flux", "FluxTransformer2DModel", FLUX),
    "Flux.1 Kontext dev": ("flux", "FluxTransformer2DModel", FLUX),
    "Flux.1 Krea dev": ("flux", "FluxTransformer2DModel", FLUX),
    "Flux.1 schnell": ("flux-schnell", "FluxTransformer2DModel", {**FLUX, "guidance_embeds": False}),
    "Flux.1 Fill dev": ("flux-fill", "FluxTransformer2DModel", {**FLUX, "in_channels": 384, "out_channels": 64}),
    "Flux.1 Canny dev": ("flux-control", "FluxTransformer2DModel", {**FLUX, "in_channels": 128, "out_channels": 64}),
    "Flux.1 Depth dev": ("flux-control", "FluxTransformer2DModel", {**FLUX, "in_channels": 128, "out_channels": 64}),
    "Flux.1 lite 8B": ("flux", "FluxTransformer2DModel", {**FLUX, "num_layers": 8}),
    "Flux.1 mini 3B": ("flux", "FluxTransformer2DModel", {**FLUX, "num_layers": 5, "num_single_layers": 10}),
    "Qwen-Image": ("qwen", "QwenImageTransformer2DModel", QWEN),
    "Qwen-Image 2512": ("qwen", "QwenImageTransformer2DModel", QWEN),
    "Qwen-Image-Edit": ("qwen", "QwenImageTransformer2DModel", QWEN),
    "Qwen-Image-Edit 2509": ("qwen", "QwenImageTransformer2DModel", QWEN),
    "Qwen-Image, pruned to 13B": ("qwen", "QwenImageTransformer2DModel", {**QWEN, "num_layers": 40}),
    "Qwen-Image-Edit 2511": ("qwen-2511", "QwenImageTransformer2DModel", {**QWEN, "zero_cond_t": True}),
    "Flux.2 dev": ("flux2", "Flux2Transformer2DModel", {"out_channels": 128}),
    "Flux.2 klein 4B": ("flux2", "Flux2Transformer2DModel", {
        "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, "out_channels": 128,
        "guidance_embeds": False}),
    "Flux.2 klein 9B": ("flux2", "Flux2Transformer2DModel", {
        "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, "out_channels": 128,
        "guidance_embeds": False}),
    "Chroma1": ("chroma", "ChromaTransformer2DModel", {"out_channels": 64}),
    "Stable Diffusion 3 medium": SD3_MEDIUM,
    "Stable Diffusion 3 medium, with its VAE": SD3_MEDIUM,
    "Stable Diffusion 3.5 medium": ("sd3", "SD3Transformer2DModel", {
        "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
        "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm"}),
    "Stable Diffusion 3.5 large": ("sd3", "SD3Transformer2DModel", {
        "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
        "qk_norm": "rms_norm"}),
    "Lumina-Image 2.0": ("lumina2", "Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
    "HunyuanVideo 1.5 T2V 480p": HUNYUAN15,
    "HunyuanVideo 1.5 I2V 480p": HUNYUAN15,
    "HunyuanVideo 1.5 T2V 720p": HUNYUAN15,
    "HunyuanVideo 1.5 I2V 720p": HUNYUAN15,
    "HunyuanVideo 1.5 T2V 480p, in the authors' names": HUNYUAN15,
    "Z-Image Turbo": ("zimage", "ZImageTransformer2DModel", {"axes_lens": [1536, 512, 512]}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Wan 2.1 Fun Control 14B": ("48 input and 16 output channels that reads CLIP vision", "WanTransformer3DModel",
                                {**WAN_I2V, "in_channels": 48}),
    "Wan 2.2 Fun Control 5B": ("100 input and 48 output", "WanTransformer3DModel", {**WAN_5B, "in_channels": 100}),
    "Wan 2.1 VACE 1.3B": ("Wan VACE", "WanVACETransformer3DModel", {
        "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "vace_layers": [0, 2], "vace_in_channels": 96}),
    "Qwen-Image-Layered": ("Qwen-Image-Layered", "QwenImageTransformer2DModel",
                           {**QWEN, "use_additional_t_cond": True}),
    "Z-Image Omni": ("Z-Image Omni", "ZImageTransformer2DModel", {"siglip_feat_dim": 1152}),
    "LTX-2": ("LTX-2|looked for", "LTX2VideoTransformer3DModel", {"num_layers": 2}),
    "HunyuanVideo": (r"HunyuanVideo 1\.0", "HunyuanVideoTransformer3DModel", {}),
    "HunyuanVideo 1.5 I2V 480p, step-distilled": ("told the next timestep", "HunyuanVideo15Transformer3DModel", {"use_meanflow": True}),
    "HunyuanVideo 1.5 super resolution 720p": ("98 input", "HunyuanVideo15Transformer3DModel", {"in_channels": 98}),
    "Sana": ("looked for", "SanaTransformer2DModel", {}),
}  # fmt: skip
RELATIVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mage-Flow": ("128 input and 32 output", "QwenImageTransformer2DModel", {
        "num_layers": 2, "in_channels": 128, "out_channels": 32, "joint_attention_dim": 2560}),
    "Z-Image on pixels": ("a Z-Image of 3 channels", "ZImageTransformer2DModel", {"n_layers": 1, "in_channels": 3}),
    "LongCat-Image": (r"lacks time_text_embed.*a relative.*looked for.*Qwen-Image", "LongCatImageTransformer2DModel", {
        "num_layers": 1, "num_single_layers": 1}),
    "Helios": ("Helios", "HeliosTransformer3DModel", {"num_layers": 1}),
    "AnyFlow": ("AnyFlow", "AnyFlowTransformer3DModel", {"num_layers": 1}),
    "Wan 2.2 Animate": ("Wan 2.2 Animate", "WanAnimateTransformer3DModel", {"num_layers": 1}),
    "SkyReels V2 DF": ("SkyReels V2", "SkyReelsV2Transformer3DModel", {"num_layers": 1, "inject_sample_info": True}),
    "a Flux.1 ControlNet": ("is a Flux.1 ControlNet", "FluxControlNetModel", {"num_layers": 1, "num_single_layers": 1}),
    "a Stable Diffusion 3 ControlNet": ("is a Stable Diffusion 3 ControlNet", "SD3ControlNetModel", {"num_layers": 1}),
}  # fmt: skip
"""What has nearly the names of a family, or all of them, in a small size."""


RECORDED = {layout: read_keys(layout) for layout in LAYOUTS}
EXPECTED = {**PUBLISHED, **REFUSED}
CASES = [
    (layout, name)
    for layout, keys in RECORDED.items()
    for name in keys
    if name in EXPECTED
    and name == next(each for each in keys if (keys[each], EXPECTED.get(each)) == (keys[name], EXPECTED[name]))
]
"""Of those with the same keys that are to be the same, the first: Flux.1 dev is Krea dev too."""


def built_shapes(class_name: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the class gives them."""
    with torch.device("meta"):
        model = getattr(diffusers, class_name)(**config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def shapes_of(layout: str, name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, as they were recorded; else as the class gives them."""
    recorded = RECORDED[layout].get(name)
    return recorded or built_shapes(*EXPECTED[name][1:])


def test_there_is_data_for_25_published_checkpoints_and_more():
    """Of names and shapes that no other has, in the original names alone."""
    both = set(RECORDED["diffusers"]) & set(RECORDED["original"])
    different = {frozenset(RECORDED["original"][name].items()) for name in both & PUBLISHED.keys()}
    assert len(different) >= 30 and both <= EXPECTED.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", EXPECTED)
def test_the_data_is_what_the_class_has(name):
    assert RECORDED["diffusers"][name] == built_shapes(*EXPECTED[name][1:])


@pytest.mark.parametrize(
    ("layout", "name"),
    [case for case in CASES if case[1] in PUBLISHED]
    + [("diffusers", name) for name in PUBLISHED if name not in RECORDED["diffusers"]],
)
def test_a_published_checkpoint_is_known_by_its_names_and_shapes(layout, name, tmp_path):
    family, class_name, config = PUBLISHED[name]
    marks = [each for each in FAMILIES[family].signature if each.startswith("__")]
    shapes = {**shapes_of(layout, name), **dict.fromkeys(marks, (0,))}
    facts = inspect_model(write_file(tmp_path / "model.safetensors", shapes))
    assert facts.family == family and facts.shapes.keys().isdisjoint(marks)
    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    published, ours = ({**defaults, **each} for each in (config, facts.config))
    said = {key: value for key, value in published.items() if key != "self" and value is not None}
    assert {key for key, value in said.items() if _plain(ours[key]) != _plain(value)} == set()
    assert FAMILIES[family].unsupported_config(published) == ""


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("layout", "name"),
    [case for case in CASES if case[1] in REFUSED]
    + [("diffusers", name) for name in REFUSED if name not in RECORDED["diffusers"]],
)
def test_a_checkpoint_that_is_not_run_is_refused_by_name_or_with_what_was_looked_for(layout, name, tmp_path):
    with pytest.raises(Refused, match=REFUSED[name][0]):
        inspect_model(write_file(tmp_path / "model.safetensors", shapes_of(layout, name)))


@pytest.mark.parametrize("name", ["Flux.1 dev", "Chroma1", "Flux.2 dev", "HunyuanVideo 1.5 T2V 480p"])
def test_a_file_that_a_newer_comfyui_saved_means_the_same(name, tmp_path):
    """It calls the weight of every norm so, and not its scale."""
    older = shapes_of("original", name)
    newer = {re.sub(r"\.scale$", ".weight", stored): shape for stored, shape in older.items()}
    assert older.keys() != newer.keys()
    facts = [inspect_model(write_file(tmp_path / "model.safetensors", shapes)) for shapes in (older, newer)]
    assert facts[0].shapes == facts[1].shapes and facts[0].config == facts[1].config


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_is_not_taken_for_the_family_that_it_looks_like(name, tmp_path):
    words, *built = RELATIVES[name]
    with pytest.raises(Refused, match=words):
        inspect_model(write_file(tmp_path / "model.safetensors", built_shapes(*built)))


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("Wan 2.1 T2V 1.3B", "blocks.3.cam_encoder.weight", "Wan 2.1 or 2.2 text to video"),
        ("Wan 2.1 FLF2V 14B", "audio_proj.proj1.weight", "Wan 2.1 image to video"),
        ("Flux.1 Fill dev", "double_blocks.0.img_attn.qkv.lora_A.weight", "Flux.1 Fill"),
        ("Qwen-Image", "optimizer.state.0.exp_avg", "Qwen-Image or Qwen-Image-Edit"),
        ("LTX-Video 0.9, 2B", "ema.proj_out.weight", "LTX-Video 0.9"),
        ("Stable Diffusion 3.5 medium", "global_step", "Stable Diffusion 3 or 3.5"),
    ],
)
def test_tensors_beside_those_of_a_family_are_refused_before_a_weight_is_read(name, more, words, tmp_path):
    """Relatives with layers of their own, and what a training run leaves."""
    path = write_file(tmp_path / "more.safetensors", {**shapes_of("original", name), more: (2,)})
    with pytest.raises(
        Refused, match=rf"has unknown 1 tensor beside those of {re.escape(words)}: {re.escape(more)}: it is a"
    ):
        inspect_model(path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"], "a LoRA, .*: choose it in Outrigger LoRA"),
        (["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], "a LoRA"),
        (["transformer.transformer_blocks.0.attn.to_q.lora.up.weight"], "a LoRA"),
        (["ip_adapter.0.to_k_ip.weight"], "an IP-Adapter"),
        (["controlnet_x_embedder.weight", "pos_embed.proj.weight"], "a ControlNet"),
        (["model.diffusion_model.input_blocks.0.0.weight"] * 9, "Stable Diffusion 1, 2 or XL"),
        (["double_layers.0.attn.w1q.weight", "cond_seq_linear.weight"], "AuraFlow"),
        (["first_stage_model.decoder.conv_in.weight"], "a VAE, .*: choose it as vae"),
        (["decoder.layers.3.conv.0.weight", "encoder.layers.0.weight"], "a VAE"),
        (
            ["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"],
            "a text encoder, .*: choose it as text_enc",
        ),
        (["text_model.encoder.layers.0.mlp.fc1.weight", "text_model.embeddings.token_embedding.weight"], "a text enc"),
        (
            ["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "visual.merger.mlp.0.bias"],
            "a text enc",
        ),
        (["vision_model.embeddings.class_embedding"], "a CLIP vision model"),
    ],
)
def test_a_file_that_is_no_model_is_refused_as_what_it_is(names, words, tmp_path):
    shapes = {f"{name}{n}" if len(set(names)) < len(names) and n else name: (2, 2) for n, name in enumerate(names)}
    with pytest.raises(Refused, match=rf"is {words}.*looked for those of: Wan"):
        inspect_model(write_file(tmp_path / "other.safetensors", shapes))


def test_hunyuanimage_that_is_told_two_timesteps_is_no_hunyuanvideo_1_5(tmp_path):
    shapes = {**shapes_of("diffusers", "HunyuanVideo"), "time_r_in.in_layer.weight": (2, 2)}
    with pytest.raises(Refused, match=r"is HunyuanVideo 1\.0 or HunyuanImage 2\.1"):
        inspect_model(write_file(tmp_path / "image.safetensors", shapes))


def test_a_file_of_two_models_is_refused_as_such(tmp_path):
    """Merged by mistake: it has all that tells Wan, and all that tells Qwen-Image."""
    merged = {**shapes_of("diffusers", "Wan 2.1 T2V 1.3B"), **shapes_of("diffusers", "Qwen-Image")}
    path = write_file(tmp_path / "merged.safetensors", merged)
    with pytest.raises(Refused, match=r"more than one architecture .*Wan.*Qwen-Image"):
        inspect_model(path)
