"""Flux.2: dev and klein, with references (Black Forest Labs 2025, github.com/black-forest-labs/flux2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit
from .flux import DOUBLE, FLUX, SINGLE
from .spec import FamilySpec, LatentFormat
from .written import Fused, Shapes, count_blocks

PATCH = (1, 1)
WIDER = 3
"""How much wider the feed-forward layers are, in every published size."""
RENAMES = (
    (r"^img_in\.", "x_embedder."),
    (r"^txt_in\.", "context_embedder."),
    (r"^time_in\.", "time_guidance_embed.timestep_embedder."),
    (r"^guidance_in\.", "time_guidance_embed.guidance_embedder."),
    (r"^(time_guidance_embed\.\w+)\.in_layer\.", r"\1.linear_1."),
    (r"^(time_guidance_embed\.\w+)\.out_layer\.", r"\1.linear_2."),
    (r"^((?:double|single)_stream_modulation\w*)\.lin\.", r"\1.linear."),
    (r"^final_layer\.linear\.", "proj_out."),
    (r"^double_blocks\.", "transformer_blocks."),
    (rf"^({DOUBLE})\.img_attn\.proj\.", r"\1.attn.to_out.0."),
    (rf"^({DOUBLE})\.txt_attn\.proj\.", r"\1.attn.to_add_out."),
    (rf"^({DOUBLE})\.img_attn\.norm\.(query|key)_norm\.(scale|weight)$", r"\1.attn.norm_\2.weight"),
    (rf"^({DOUBLE})\.txt_attn\.norm\.(query|key)_norm\.(scale|weight)$", r"\1.attn.norm_added_\2.weight"),
    (rf"^({DOUBLE})\.img_mlp\.", r"\1.ff."),
    (rf"^({DOUBLE})\.txt_mlp\.", r"\1.ff_context."),
    (rf"^({DOUBLE}\.ff(_context)?)\.0\.", r"\1.linear_in."),
    (rf"^({DOUBLE}\.ff(_context)?)\.2\.", r"\1.linear_out."),
    (r"^single_blocks\.", "single_transformer_blocks."),
    (rf"^({SINGLE})\.linear1\.", r"\1.attn.to_qkv_mlp_proj."),
    (rf"^({SINGLE})\.linear2\.", r"\1.attn.to_out."),
    (rf"^({SINGLE})\.norm\.(query|key)_norm\.(scale|weight)$", r"\1.attn.norm_\2.weight"),
    (r"\.norm_(added_)?query\.weight$", r".norm_\1q.weight"),
    (r"\.norm_(added_)?key\.weight$", r".norm_\1k.weight"),
)
FUSED = (
    Fused(
        rf"({DOUBLE})\.img_attn\.qkv",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.to_{name}", (block,)) for block, name in enumerate("qkv")),
    ),
    Fused(
        rf"({DOUBLE})\.txt_attn\.qkv",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.add_{name}_proj", (block,)) for block, name in enumerate("qkv")),
    ),
    Fused(r"final_layer\.adaLN_modulation\.1", blocks=(1, 1), parts=(("norm_out.linear", (1, 0)),)),
)
"""The modulation of the last layer has shift before scale there, and scale first in diffusers."""


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels = shapes["x_embedder.weight"]
    [head_dim] = shapes["transformer_blocks.0.attn.norm_q.weight"]
    return {
        "patch_size": PATCH[0],
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count_blocks(shapes, "transformer_blocks"),
        "num_single_layers": count_blocks(shapes, "single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "mlp_ratio": shapes["transformer_blocks.0.ff.linear_out.weight"][1] / width,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": (head_dim // 4,) * 4,
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Flux.2 dev or klein; empty when it is."""
    taken, wider = config.get("in_channels", 128), config.get("mlp_ratio", WIDER)
    given = config.get("out_channels") or taken
    if (taken, given, wider) == (LATENT.channels, LATENT.channels, WIDER):
        return ""
    return f"a Flux.2 of {taken} input and {given} output channels, its feed-forward layers {wider:g} times wider"


LATENT = LatentFormat(
    channels=128,
    dims=2,
    spatial=16,
    temporal=1,
    mean=(0.0,) * 128,
    std=(1.0,) * 128,
    rgb=(
        (0.0058, 0.0113, 0.0073), (0.0495, 0.0443, 0.0836), (-0.0099, 0.0096, 0.0644), (0.2144, 0.3009, 0.3652),
        (0.0166, -0.0039, -0.0054), (0.0157, 0.0103, -0.0160), (-0.0398, 0.0902, -0.0235), (-0.0052, 0.0095, 0.0109),
        (-0.3527, -0.2712, -0.1666), (-0.0301, -0.0356, -0.0180), (-0.0107, 0.0078, 0.0013), (0.0746, 0.0090, -0.0941),
        (0.0156, 0.0169, 0.0070), (-0.0034, -0.0040, -0.0114), (0.0032, 0.0181, 0.0080), (-0.0939, -0.0008, 0.0186),
        (0.0018, 0.0043, 0.0104), (0.0284, 0.0056, -0.0127), (-0.0024, -0.0022, -0.0030), (0.1207, -0.0026, 0.0065),
        (0.0128, 0.0101, 0.0142), (0.0137, -0.0072, -0.0007), (0.0095, 0.0092, -0.0059), (0.0000, -0.0077, -0.0049),
        (-0.0465, -0.0204, -0.0312), (0.0095, 0.0012, -0.0066), (0.0290, -0.0034, 0.0025), (0.0220, 0.0169, -0.0048),
        (-0.0332, -0.0457, -0.0468), (-0.0085, 0.0389, 0.0609), (-0.0076, 0.0003, -0.0043), (-0.0111, -0.0460, -0.0614),
    ),
    rgb_bias=(-0.0329, -0.0718, -0.0851),
    shuffle=2,
)  # fmt: skip

TINY = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 128,
        "out_channels": 128,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "mlp_ratio": 3.0,
        "guidance_embeds": True,
        "axes_dims_rope": (8, 8, 8, 8),
    }
)
"""For tests: 4 heads of 32, 2 double and 2 single blocks."""

FLUX2 = FamilySpec(
    name="flux2",
    title="Flux.2 dev or klein",
    pipeline_classes=("Flux2Pipeline", "Flux2KleinPipeline"),
    transformer_class="Flux2Transformer2DModel",
    signature=(
        "x_embedder.weight",
        "context_embedder.weight",
        "double_stream_modulation_img.linear.weight",
        "transformer_blocks.0.attn.add_q_proj.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "transformer_blocks.0.ff.linear_out.weight",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        "proj_out.weight",
    ),
    variants=(),
    renames=RENAMES,
    fused=FUSED,
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="joint_attention_dim",
    guidance_key="guidance_embeds",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    split=FLUX.split,
    self_attention=rf"({DOUBLE}|{SINGLE})\.attn",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"{DOUBLE}\.attn\.(to_[qkv]|add_[qkv]_proj)", "column"),
            LinearShard(rf"{DOUBLE}\.attn\.(to_out\.0|to_add_out)", "row"),
            LinearShard(rf"{DOUBLE}\.(ff|ff_context)\.linear_in", "column", blocks=(1, 1)),
            LinearShard(rf"{DOUBLE}\.(ff|ff_context)\.linear_out", "row"),
            LinearShard(rf"{SINGLE}\.attn\.to_qkv_mlp_proj", "column", blocks=(1,) * (3 + 2 * WIDER)),
            LinearShard(rf"{SINGLE}\.attn\.to_out", "row", blocks=(1,) * (1 + WIDER)),
            LinearShard(r"(double_stream_modulation_(img|txt)|single_stream_modulation|norm_out)\.linear", "gather"),
        )
    ),
    patch=PATCH,
    inputs=(
        ("encoder_hidden_states", "embedding"),
        ("guidance", "guidance"),
        ("img_ids", "image_places"),
        ("txt_ids", "text_places"),
    ),
    keep_float32=(),
    rebuilt=(),
    prediction="velocity",
    shift=math.exp(2.02),
    latent=LATENT,
    vae_class="AutoencoderKLFlux2",
    activations=Activations(
        mlp=Moment(3, cut=9, hidden=1),
        attention=Moment(2, hidden=1),
        first=Moment(3),
        last=Moment(2, cut=9, hidden=1),
    ),
    text_length=512,
    tiny=TINY,
    packed=True,
    timestep_scale=1.0,
    rounded_timestep=(r"time_guidance_embed\.time_proj", 1000.0),
    sigma_table=10000,
    references=("index", "offset", "uxo"),
    references_apart=10,
    text_fill=512,
    text_encoders="Mistral (dev) or Qwen3 (klein): use a CLIP Loader (type flux2) and CLIP Text Encode",
)
"""The rows of a single block's first layer are dealt as heads are, those of its feed-forward part in as many turns as it is
wider: the class tells the two apart by their relative sizes.
"""
