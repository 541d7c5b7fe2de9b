"""HunyuanVideo 1.5, text and picture to video, in one architecture (Tencent 2025, arXiv:2511.18870)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import flux2
from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .flux import DOUBLE
from .spec import FamilySpec, LatentFormat
from .written import Fused, Shapes, Variant, count_blocks

PATCH = (1, 1, 1)
REFINERS = "context_embedder.token_refiner.refiner_blocks"
REFINER = rf"{re.escape(REFINERS)}\.\d+"
RENAMES = (
    (r"^img_in\.", "x_embedder."),
    (r"^time_in\.", "time_embed.timestep_embedder."),
    (r"^time_r_in\.", "time_embed.timestep_embedder_r."),
    (r"^txt_in\.input_embedder\.", "context_embedder.proj_in."),
    (r"^txt_in\.t_embedder\.", "context_embedder.time_text_embed.timestep_embedder."),
    (r"^txt_in\.c_embedder\.", "context_embedder.time_text_embed.text_embedder."),
    (r"^((?:context_embedder\.time_text|time)_embed\.\w+)\.(in_layer|mlp\.0)\.", r"\1.linear_1."),
    (r"^((?:context_embedder\.time_text|time)_embed\.\w+)\.(out_layer|mlp\.2)\.", r"\1.linear_2."),
    (r"^txt_in\.individual_token_refiner\.blocks\.", f"{REFINERS}."),
    (rf"^({REFINER})\.self_attn[._]proj\.", r"\1.attn.to_out.0."),
    (rf"^({REFINER})\.self_attn_qkv\.", r"\1.self_attn.qkv."),
    (rf"^({REFINER})\.mlp\.", r"\1.ff."),
    (rf"^({REFINER})\.adaLN_modulation\.1\.", r"\1.norm_out.linear."),
    (r"^byt5_in\.layernorm\.", "context_embedder_2.norm."),
    (r"^byt5_in\.fc(\d)\.", r"context_embedder_2.linear_\1."),
    (r"^vision_in\.proj\.0\.", "image_embedder.norm_in."),
    (r"^vision_in\.proj\.1\.", "image_embedder.linear_1."),
    (r"^vision_in\.proj\.3\.", "image_embedder.linear_2."),
    (r"^vision_in\.proj\.4\.", "image_embedder.norm_out."),
    (r"^cond_type_embedding\.", "cond_type_embed."),
    (r"^final_layer\.linear\.", "proj_out."),
    (r"^double_blocks\.", "transformer_blocks."),
    (rf"^({DOUBLE})\.img_mod\.lin(ear)?\.", r"\1.norm1.linear."),
    (rf"^({DOUBLE})\.txt_mod\.lin(ear)?\.", r"\1.norm1_context.linear."),
    (rf"^({DOUBLE})\.img_attn[._]proj\.", r"\1.attn.to_out.0."),
    (rf"^({DOUBLE})\.txt_attn[._]proj\.", r"\1.attn.to_add_out."),
    (rf"^({DOUBLE})\.(img|txt)_attn_qkv\.", r"\1.\2_attn.qkv."),
    (rf"^({DOUBLE})\.img_attn_([qkv])\.", r"\1.attn.to_\2."),
    (rf"^({DOUBLE})\.txt_attn_([qkv])\.", r"\1.attn.add_\2_proj."),
    (rf"^({DOUBLE})\.(img|txt)_attn\.norm\.query_norm\.(scale|weight)$", r"\1.\2_attn_q_norm.weight"),
    (rf"^({DOUBLE})\.(img|txt)_attn\.norm\.key_norm\.(scale|weight)$", r"\1.\2_attn_k_norm.weight"),
    (rf"^({DOUBLE})\.img_attn_([qk])_norm\.", r"\1.attn.norm_\2."),
    (rf"^({DOUBLE})\.txt_attn_([qk])_norm\.", r"\1.attn.norm_added_\2."),
    (rf"^({DOUBLE})\.img_mlp\.", r"\1.ff."),
    (rf"^({DOUBLE})\.txt_mlp\.", r"\1.ff_context."),
    (rf"^(({DOUBLE}|{REFINER})\.ff(_context)?)\.(0|fc1)\.", r"\1.net.0.proj."),
    (rf"^(({DOUBLE}|{REFINER})\.ff(_context)?)\.(2|fc2)\.", r"\1.net.2."),
)
"""From ComfyUI's names, which are Flux.1's, the authors' own, which have query, key and value apart, and those of LoRAs."""
FUSED = (
    Fused(
        rf"({REFINER})\.self_attn\.qkv",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.to_{name}", (block,)) for block, name in enumerate("qkv")),
    ),
    *flux2.FUSED,
)


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels, *patch = shapes["x_embedder.proj.weight"]
    [head_dim] = shapes["transformer_blocks.0.attn.norm_q.weight"]
    return {
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "num_attention_heads": width // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": count_blocks(shapes, "transformer_blocks"),
        "num_refiner_layers": count_blocks(shapes, re.escape(REFINERS)),
        "mlp_ratio": shapes["transformer_blocks.0.ff.net.0.proj.weight"][0] / width,
        "patch_size": patch[-1],
        "patch_size_t": patch[0],
        "text_embed_dim": shapes["context_embedder.proj_in.weight"][1],
        "text_embed_2_dim": shapes["context_embedder_2.linear_1.weight"][1],
        "image_embed_dim": shapes["image_embedder.linear_1.weight"][1],
        "rope_axes_dim": (head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not HunyuanVideo 1.5 for text or a picture; empty when it is."""
    channels = config.get("in_channels", 65), config.get("out_channels") or 32
    if config.get("use_meanflow"):
        return TWO_STEPS
    if channels != (2 * LATENT.channels + 1, LATENT.channels):
        return "a HunyuanVideo 1.5 of {} input and {} output channels, such as for super resolution".format(*channels)
    return ""


TWO_STEPS = "a HunyuanVideo 1.5 that is told the next timestep too (step-distilled or super resolution)"
OLDER = "HunyuanVideo 1.0 or HunyuanImage 2.1"
LATENT = LatentFormat(
    channels=32,
    dims=3,
    spatial=16,
    temporal=4,
    mean=(0.0,) * 32,
    std=(1 / 1.03682,) * 32,
    rgb=(
        (0.0568, -0.0521, -0.0131), (0.0014, 0.0735, 0.0326), (0.0186, 0.0531, -0.0138), (-0.0031, 0.0051, 0.0288),
        (0.0110, 0.0556, 0.0432), (-0.0041, -0.0023, -0.0485), (0.0530, 0.0413, 0.0253), (0.0283, 0.0251, 0.0339),
        (0.0277, -0.0372, -0.0093), (0.0393, 0.0944, 0.1131), (0.0020, 0.0251, 0.0037), (-0.0017, 0.0012, 0.0234),
        (0.0468, 0.0436, 0.0203), (0.0354, 0.0439, -0.0233), (0.0090, 0.0123, 0.0346), (0.0382, 0.0029, 0.0217),
        (0.0261, -0.0300, 0.0030), (-0.0088, -0.0220, -0.0283), (-0.0272, -0.0121, -0.0363), (-0.0664, -0.0622, 0.0144),
        (0.0414, 0.0479, 0.0529), (0.0355, 0.0612, -0.0247), (0.0147, 0.0264, 0.0174), (0.0438, 0.0038, 0.0542),
        (0.0431, -0.0573, -0.0033), (-0.0162, -0.0211, -0.0406), (-0.0487, -0.0295, -0.0393), (0.0005, -0.0109, 0.0253),
        (0.0296, 0.0591, 0.0353), (0.0119, 0.0181, -0.0306), (-0.0085, -0.0362, 0.0229), (0.0005, -0.0106, 0.0242),
    ),
    rgb_bias=(0.0456, -0.0202, -0.0644),
    preview_decoder="lighttaehy1_5",
)  # fmt: skip

TINY = MappingProxyType(
    {
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 4.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "text_embed_dim": 64,
        "text_embed_2_dim": 24,
        "image_embed_dim": 48,
        "rope_axes_dim": (4, 14, 14),
    }
)
"""For tests: 4 heads of 32, 2 blocks behind one refiner of the text."""

HUNYUAN15 = FamilySpec(
    name="hunyuan-1.5",
    title="HunyuanVideo 1.5",
    pipeline_classes=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    transformer_class="HunyuanVideo15Transformer3DModel",
    signature=(
        "x_embedder.proj.weight",
        "context_embedder.proj_in.weight",
        f"{REFINERS}.0.attn.to_q.weight",
        f"{REFINERS}.0.norm_out.linear.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "transformer_blocks.0.ff_context.net.0.proj.weight",
        "proj_out.weight",
        "context_embedder_2.linear_1.weight",
        "image_embedder.linear_1.weight",
    ),
    variants=(
        Variant(OLDER, "single_blocks.0.linear1.weight"),
        Variant(OLDER, "single_transformer_blocks.0.proj_mlp.weight"),
        Variant(TWO_STEPS, "time_embed.timestep_embedder_r.linear_1.weight"),
    ),
    renames=RENAMES,
    fused=FUSED,
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="text_embed_dim",
    second_text_width="text_embed_2_dim",
    vision_width="image_embed_dim",
    blocks=("transformer_blocks",),
    split=TokenSplit(
        split=(
            TokenPlace("rope", dim=0),
            TokenPlace("x_embedder"),
            TokenPlace("transformer_blocks.0", "encoder_hidden_states", stream="text"),
        ),
        gathered=(TokenPlace("proj_out"),),
        masks=(TokenPlace(DOUBLE, "attention_mask", stream="text"),),
        joined=("image", "text"),
        on_one_rank=True,
    ),
    self_attention=rf"{DOUBLE}\.attn",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"({DOUBLE}|{REFINER})\.attn\.to_[qkv]", "column"),
            LinearShard(rf"({DOUBLE}|{REFINER})\.attn\.to_out\.0", "row"),
            LinearShard(rf"{DOUBLE}\.attn\.add_[qkv]_proj", "column"),
            LinearShard(rf"{DOUBLE}\.attn\.to_add_out", "row"),
            LinearShard(rf"({DOUBLE}|{REFINER})\.ff(_context)?\.net\.0\.proj", "column"),
            LinearShard(rf"({DOUBLE}|{REFINER})\.ff(_context)?\.net\.2", "row"),
            LinearShard(rf"{DOUBLE}\.norm1(_context)?\.linear", "gather"),
            LinearShard(rf"({REFINER}\.)?norm_out\.linear", "gather"),
        ),
        attentions=rf"({DOUBLE}|{REFINER})\.attn",
    ),
    patch=PATCH,
    inputs=(
        ("encoder_hidden_states", "embedding"),
        ("encoder_attention_mask", "word_mask"),
        ("encoder_hidden_states_2", "second_embedding"),
        ("encoder_attention_mask_2", "second_mask"),
        ("image_embeds", "clip_vision_last"),
    ),
    keep_float32=(),
    rebuilt=(),
    in_model_dtype=r"time_embed\.timestep_embedder",
    beside=("picture", "given places"),
    sees_kept_clean=True,
    prediction="velocity",
    shift=7.0,
    latent=LATENT,
    vae_class="",
    activations=Activations(
        mlp=Moment(4, hidden=2, text=7),
        of_text=Moment(7, hidden=2, text=5),
        attention=Moment(4),
        undealt=1,
        head_tables=2,
    ),
    text_length=1000,
    tiny=TINY,
    after_gelu=rf"{DOUBLE}\.ff(_context)?\.net\.2",
    text_encoders="Qwen2.5-VL and ByT5: use a DualCLIPLoader (type hunyuan_video_15) and CLIP Text Encode",
)
"""Of the two refiners of the text every rank has all tokens: they are a thousand, beside those of a video."""
