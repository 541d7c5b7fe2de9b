"""Qwen-Image and Qwen-Image-Edit, up to 2509 and 2511 (Qwen Team 2025, arXiv:2508.02324)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .spec import FamilySpec
from .texts import QWEN25_VL
from .wan import LATENT
from .written import NunchakuFile, PackedLinear, Rebuilt, Shapes, Variant

PATCH = (1, 2, 2)
MARK = "__index_timestep_zero__"
"""An empty tensor of ComfyUI's files, by which 2511 is told."""


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels = shapes["img_in.weight"]
    [head_dim] = shapes["transformer_blocks.0.attn.norm_q.weight"]
    layers = {int(found[1]) for name in shapes if (found := re.match(r"transformer_blocks\.(\d+)\.", name))}
    return {
        "patch_size": PATCH[-1],
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0] // math.prod(PATCH),
        "num_layers": len(layers),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": (head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Qwen-Image; empty when it is."""
    if config.get("use_additional_t_cond") or config.get("use_layer3d_rope"):
        return "Qwen-Image-Layered"
    if config.get("zero_cond_t"):
        return "Qwen-Image-Edit 2511"
    return _of_other_channels(config)


def not_2511(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Qwen-Image-Edit 2511; empty when it is."""
    return _of_other_channels(config) if config.get("zero_cond_t") else unsupported_config(config) or QWEN.title


def _of_other_channels(config: Mapping[str, Any]) -> str:
    """What a configuration is when it works on other latents, as Mage-Flow's does; empty when it does not."""
    channels = config.get("in_channels", 64), config.get("out_channels") or 16
    return "" if channels == (64, 16) else "a Qwen-Image of {} input and {} output channels".format(*channels)


TINY = MappingProxyType(
    {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "axes_dims_rope": (4, 14, 14),
    }
)
"""For tests: 4 heads of 32, 2 blocks."""

BLOCK = r"transformer_blocks\.\d+"

QWEN = FamilySpec(
    name="qwen",
    title="Qwen-Image or Qwen-Image-Edit",
    pipeline_classes=("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
    transformer_class="QwenImageTransformer2DModel",
    signature=(
        "img_in.weight",
        "txt_in.weight",
        "txt_norm.weight",
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.0.attn.add_q_proj.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "proj_out.weight",
    ),
    variants=(
        Variant("Qwen-Image-Layered", "time_text_embed.addition_t_embedding.weight"),
        Variant("Qwen-Image-Edit 2511", MARK),
        Variant("a Qwen-Image ControlNet", "controlnet_blocks.0.weight"),
    ),
    renames=(),
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="joint_attention_dim",
    blocks=("transformer_blocks",),
    split=TokenSplit(
        split=(
            TokenPlace("", "hidden_states"),
            TokenPlace("pos_embed", item=0, dim=0),
            TokenPlace("pos_embed", item=1, dim=0, stream="text"),
            TokenPlace("transformer_blocks.0", "encoder_hidden_states", stream="text"),
            TokenPlace(r"transformer_blocks\.\d+", "modulate_index"),
        ),
        gathered=(TokenPlace("proj_out"),),
        masks=(TokenPlace("", "encoder_hidden_states_mask", stream="text"),),
        joined=("text", "image"),
    ),
    self_attention=rf"{BLOCK}\.attn",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"{BLOCK}\.attn\.(to_[qkv]|add_[qkv]_proj)", "column"),
            LinearShard(rf"{BLOCK}\.attn\.(to_out\.0|to_add_out)", "row"),
            LinearShard(rf"{BLOCK}\.(img|txt)_mlp\.net\.0\.proj", "column"),
            LinearShard(rf"{BLOCK}\.(img|txt)_mlp\.net\.2", "row"),
            LinearShard(rf"{BLOCK}\.(img|txt)_mod\.1", "gather"),
            LinearShard(r"norm_out\.linear", "gather"),
        )
    ),
    patch=PATCH,
    inputs=(
        ("encoder_hidden_states", "embedding"),
        ("encoder_hidden_states_mask", "attention_mask"),
        ("img_shapes", "image_shapes"),
    ),
    keep_float32=(),
    rebuilt=(Rebuilt("pos_embed", (("axes", "axes_dims_rope"),), stand_in="centred positions"),),
    prediction="velocity",
    shift=math.exp(1.15),
    latent=LATENT,
    vae_class="AutoencoderKLQwenImage",
    activations=Activations(
        mlp=Moment(7, hidden=2, text=5),
        of_text=Moment(7, hidden=2, text=9),
        attention=Moment(2, cut=3),
        referred=Moment(9, hidden=2, text=5),
    ),
    text_length=512,
    tiny=TINY,
    nunchaku=(
        PackedLinear("transformer_blocks.{}.attn.to_qkv", tuple(f"transformer_blocks.{{}}.attn.to_{x}" for x in "qkv")),
        PackedLinear(
            "transformer_blocks.{}.attn.add_qkv_proj",
            tuple(f"transformer_blocks.{{}}.attn.add_{x}_proj" for x in "qkv"),
        ),
    ),
    nunchaku_file=NunchakuFile("NunchakuQwenImageTransformer2DModel", modulation=rf"{BLOCK}\.(img|txt)_mod\.1"),
    after_gelu=rf"{BLOCK}\.(img|txt)_mlp\.net\.2",
    packed=True,
    timestep_scale=1.0,
    rounded_timestep=(r"time_text_embed\.time_proj", 1.0),
    sigma_table=10000,
    references=("index", "index_timestep_zero"),
    clean_references="zero_cond_t",
    text_encoders="Qwen2.5-VL: use a CLIP Loader (type qwen_image) and CLIP Text Encode",
    texts=QWEN25_VL,
)

QWEN_2511 = replace(
    QWEN,
    name="qwen-2511",
    title="Qwen-Image-Edit 2511",
    signature=(*QWEN.signature, MARK),
    variants=tuple(variant for variant in QWEN.variants if variant.tensor != MARK),
    unused=MARK,
    config_from=lambda shapes: {**config_from(shapes), "zero_cond_t": True},
    unsupported_config=not_2511,
    references=("index_timestep_zero", "index"),
    tiny=MappingProxyType({**TINY, "zero_cond_t": True}),
)
"""The tokens of references are modulated as if they had no noise, where no other way is asked for."""
