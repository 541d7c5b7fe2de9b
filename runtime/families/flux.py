"""Flux.1: dev and Kontext, schnell, Fill, Canny and Depth (Black Forest Labs 2024, github.com/black-forest-labs/flux)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .spec import FamilySpec, LatentFormat
from .texts import CLIP_AND_T5
from .written import Fused, NunchakuFile, PackedLinear, Shapes, Variant, count_blocks

PATCH = (2, 2)
RENAMES = (
    (r"^((?:single_)?transformer_blocks\.\d+)\.(norm_(?:added_)?[qk])\.", r"\1.attn.\2."),
    (r"^img_in\.", "x_embedder."),
    (r"^txt_in\.", "context_embedder."),
    (r"^time_in\.", "time_text_embed.timestep_embedder."),
    (r"^vector_in\.", "time_text_embed.text_embedder."),
    (r"^guidance_in\.", "time_text_embed.guidance_embedder."),
    (r"^(time_text_embed\.\w+)\.in_layer\.", r"\1.linear_1."),
    (r"^(time_text_embed\.\w+)\.out_layer\.", r"\1.linear_2."),
    (r"^final_layer\.linear\.", "proj_out."),
    (r"^double_blocks\.", "transformer_blocks."),
    (r"^(transformer_blocks\.\d+)\.img_mod\.lin\.", r"\1.norm1.linear."),
    (r"^(transformer_blocks\.\d+)\.txt_mod\.lin\.", r"\1.norm1_context.linear."),
    (r"^(transformer_blocks\.\d+)\.(img_attn\.proj|processor\.proj_lora1)\.", r"\1.attn.to_out.0."),
    (r"^(transformer_blocks\.\d+)\.(txt_attn\.proj|processor\.proj_lora2)\.", r"\1.attn.to_add_out."),
    (r"^(transformer_blocks\.\d+)\.img_attn\.norm\.(query|key)_norm\.(scale|weight)$", r"\1.attn.norm_\2.weight"),
    (r"^(transformer_blocks\.\d+)\.txt_attn\.norm\.(query|key)_norm\.(scale|weight)$", r"\1.attn.norm_added_\2.weight"),
    (r"^(transformer_blocks\.\d+)\.img_mlp\.", r"\1.ff."),
    (r"^(transformer_blocks\.\d+)\.txt_mlp\.", r"\1.ff_context."),
    (r"^(transformer_blocks\.\d+\.ff(_context)?)\.0\.", r"\1.net.0.proj."),
    (r"^(transformer_blocks\.\d+\.ff(_context)?)\.2\.", r"\1.net.2."),
    (r"^single_blocks\.", "single_transformer_blocks."),
    (r"^(single_transformer_blocks\.\d+)\.modulation\.lin\.", r"\1.norm.linear."),
    (r"^(single_transformer_blocks\.\d+)\.(linear2|processor\.proj)\.", r"\1.proj_out."),
    (r"^(single_transformer_blocks\.\d+)\.norm\.(query|key)_norm\.(scale|weight)$", r"\1.attn.norm_\2.weight"),
    (r"\.norm_(added_)?query\.weight$", r".norm_\1q.weight"),
    (r"\.norm_(added_)?key\.weight$", r".norm_\1k.weight"),
)
"""From Black Forest Labs' names, of which newer ComfyUIs save the scales of norms as weights, and from those that xlabs' LoRAs
have for some layers (`processor`)."""

DOUBLE, SINGLE = r"transformer_blocks\.\d+", r"single_transformer_blocks\.\d+"
FUSED = (
    Fused(
        rf"({DOUBLE})\.(img_attn\.qkv|processor\.qkv_lora1)",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.to_{name}", (block,)) for block, name in enumerate("qkv")),
    ),
    Fused(
        rf"({DOUBLE})\.(txt_attn\.qkv|processor\.qkv_lora2)",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.add_{name}_proj", (block,)) for block, name in enumerate("qkv")),
    ),
    Fused(
        rf"({SINGLE})\.linear1",
        blocks=(1, 1, 1, 4),
        parts=(
            *((rf"\1.attn.to_{name}", (block,)) for block, name in enumerate("qkv")),
            (r"\1.proj_mlp", (3,)),
        ),
    ),
    Fused(
        rf"({SINGLE})\.(linear1_qkv|processor\.qkv)",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.to_{name}", (block,)) for block, name in enumerate("qkv")),
    ),
    Fused(r"final_layer\.adaLN_modulation\.1", blocks=(1, 1), parts=(("norm_out.linear", (1, 0)),)),
)
"""The modulation of the last layer has shift before scale there, and scale first in diffusers."""


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels = shapes["x_embedder.weight"]
    [head_dim] = shapes["transformer_blocks.0.attn.norm_q.weight"]
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count_blocks(shapes, "transformer_blocks"),
        "num_single_layers": count_blocks(shapes, "single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": (head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Flux.1 dev; empty when it is."""
    if config.get("guidance_embeds") and _channels(config) == (64, 64):
        return ""
    return _named(config)


def not_schnell(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Flux.1 schnell; empty when it is."""
    return _named(config) if config.get("guidance_embeds") or _channels(config) != (64, 64) else ""


def not_fill(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Flux.1 Fill; empty when it is."""
    return "" if config.get("guidance_embeds") and _channels(config) == (384, 64) else _named(config)


def not_control(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Flux.1 Canny or Depth; empty when it is."""
    return "" if config.get("guidance_embeds") and _channels(config) == (128, 64) else _named(config)


def _channels(config: Mapping[str, Any]) -> tuple[int, int]:
    taken = config.get("in_channels", 64)
    return taken, config.get("out_channels") or taken


def _named(config: Mapping[str, Any]) -> str:
    guidance = "with" if config.get("guidance_embeds") else "without"
    return "a Flux.1 of {} input and {} output channels, {} distilled guidance".format(*_channels(config), guidance)


LATENT = LatentFormat(
    channels=16,
    dims=2,
    spatial=8,
    temporal=1,
    mean=(0.1159,) * 16,
    std=(1 / 0.3611,) * 16,
    rgb=(
        (-0.0346, 0.0244, 0.0681), (0.0034, 0.0210, 0.0687), (0.0275, -0.0668, -0.0433), (-0.0174, 0.0160, 0.0617),
        (0.0859, 0.0721, 0.0329), (0.0004, 0.0383, 0.0115), (0.0405, 0.0861, 0.0915), (-0.0236, -0.0185, -0.0259),
        (-0.0245, 0.0250, 0.1180), (0.1008, 0.0755, -0.0421), (-0.0515, 0.0201, 0.0011), (0.0428, -0.0012, -0.0036),
        (0.0817, 0.0765, 0.0749), (-0.1264, -0.0522, -0.1103), (-0.0280, -0.0881, -0.0499), (-0.1262, -0.0982, -0.0778),
    ),
    rgb_bias=(-0.0329, -0.0718, -0.0851),
    preview_decoder="taef1_decoder",
)  # fmt: skip

TINY = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 14, 14),
    }
)
"""For tests: 4 heads of 32, 2 double and 2 single blocks."""

EMBEDDERS = (
    LinearShard(r"time_text_embed\.\w+\.linear_1", "column"),
    LinearShard(r"time_text_embed\.\w+\.linear_2", "row"),
)
"""They see a single token each, so that cutting them costs next to nothing."""

_DOUBLE, _SINGLE = "transformer_blocks.{}.", "single_transformer_blocks.{}."
NUNCHAKU = (
    PackedLinear(_DOUBLE + "qkv_proj", tuple(f"{_DOUBLE}attn.to_{x}" for x in "qkv")),
    PackedLinear(_DOUBLE + "qkv_proj_context", tuple(f"{_DOUBLE}attn.add_{x}_proj" for x in "qkv")),
    PackedLinear(_DOUBLE + "out_proj", (_DOUBLE + "attn.to_out.0",)),
    PackedLinear(_DOUBLE + "out_proj_context", (_DOUBLE + "attn.to_add_out",)),
    PackedLinear(_DOUBLE + "mlp_fc1", (_DOUBLE + "ff.net.0.proj",)),
    PackedLinear(_DOUBLE + "mlp_fc2", (_DOUBLE + "ff.net.2",)),
    PackedLinear(_DOUBLE + "mlp_context_fc1", (_DOUBLE + "ff_context.net.0.proj",)),
    PackedLinear(_DOUBLE + "mlp_context_fc2", (_DOUBLE + "ff_context.net.2",)),
    PackedLinear(_SINGLE + "qkv_proj", tuple(f"{_SINGLE}attn.to_{x}" for x in "qkv")),
    PackedLinear(_SINGLE + "mlp_fc1", (_SINGLE + "proj_mlp",)),
    PackedLinear(_SINGLE + "out_proj", (_SINGLE + "proj_out",), part=0),
    PackedLinear(_SINGLE + "mlp_fc2", (_SINGLE + "proj_out",), part=1),
)


def comfy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Nunchaku's nodes make ComfyUI's model from."""
    head_dim, taken, patch = config["attention_head_dim"], config["in_channels"], math.prod(PATCH)
    sizes = {
        "axes_dim": list(config["axes_dims_rope"]),
        "context_in_dim": config["joint_attention_dim"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "guidance_embed": config["guidance_embeds"],
        "hidden_size": config["num_attention_heads"] * head_dim,
        "in_channels": taken // patch,
        "num_heads": config["num_attention_heads"],
        "out_channels": (config.get("out_channels") or taken) // patch,
        "patch_size": PATCH[0],
        "vec_in_dim": config["pooled_projection_dim"],
    }
    fixed = {"image_model": "flux", "mlp_ratio": 4.0, "qkv_bias": True, "theta": 10000}
    model_class = "Flux" if config["guidance_embeds"] else "FluxSchnell"
    return {"model_class": model_class, "model_config": {**sizes, **fixed, "disable_unet_model_creation": True}}


FLUX = FamilySpec(
    name="flux",
    title="Flux.1 dev or Kontext",
    pipeline_classes=("FluxPipeline", "FluxKontextPipeline"),
    transformer_class="FluxTransformer2DModel",
    signature=(
        "x_embedder.weight",
        "context_embedder.weight",
        "time_text_embed.text_embedder.linear_1.weight",
        "transformer_blocks.0.attn.add_q_proj.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "single_transformer_blocks.0.proj_mlp.weight",
        "proj_out.weight",
    ),
    variants=(Variant("a Flux.1 ControlNet", "controlnet_blocks.0.weight"),),
    renames=RENAMES,
    fused=FUSED,
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="joint_attention_dim",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    split=TokenSplit(
        split=(
            TokenPlace("", "hidden_states"),
            TokenPlace("", "img_ids", dim=0),
            TokenPlace("", "encoder_hidden_states", stream="text"),
            TokenPlace("", "txt_ids", stream="text", dim=0),
        ),
        gathered=(TokenPlace("proj_out"),),
        joined=("text", "image"),
    ),
    self_attention=rf"({DOUBLE}|{SINGLE})\.attn",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"({DOUBLE}|{SINGLE})\.attn\.to_[qkv]", "column"),
            LinearShard(rf"{DOUBLE}\.attn\.add_[qkv]_proj", "column"),
            LinearShard(rf"{DOUBLE}\.attn\.(to_out\.0|to_add_out)", "row"),
            LinearShard(rf"{DOUBLE}\.(ff|ff_context)\.net\.0\.proj", "column"),
            LinearShard(rf"{DOUBLE}\.(ff|ff_context)\.net\.2", "row"),
            LinearShard(rf"{DOUBLE}\.(norm1|norm1_context)\.linear", "gather"),
            LinearShard(rf"{SINGLE}\.proj_mlp", "column"),
            LinearShard(rf"{SINGLE}\.proj_out", "row", blocks=(1, 4)),
            LinearShard(rf"{SINGLE}\.norm\.linear", "gather"),
            LinearShard(r"norm_out\.linear", "gather"),
            LinearShard(r"context_embedder", "gather"),
            *EMBEDDERS,
        ),
        attentions=rf"({DOUBLE}|{SINGLE})\.attn",
    ),
    patch=PATCH,
    inputs=(
        ("encoder_hidden_states", "embedding"),
        ("pooled_projections", "pooled"),
        ("guidance", "guidance"),
        ("img_ids", "image_ids"),
        ("txt_ids", "text_ids"),
    ),
    keep_float32=(),
    rebuilt=(),
    prediction="velocity",
    shift=math.exp(1.15),
    latent=LATENT,
    vae_class="AutoencoderKL",
    activations=Activations(
        mlp=Moment(5, cut=2, hidden=2),
        attention=Moment(3, hidden=1),
        widened=Moment(3, cut=10, hidden=1),  # as a query or key is turned, the MLP's part of a single block beside it
        last=Moment(3, cut=2, hidden=2),
    ),
    text_length=512,
    tiny=TINY,
    nunchaku=NUNCHAKU,
    nunchaku_file=NunchakuFile(
        "NunchakuFluxTransformer2dModel",
        modulation=rf"{DOUBLE}\.(norm1|norm1_context)\.linear|{SINGLE}\.norm\.linear",
        renames=((rf"^({DOUBLE}|{SINGLE})\.attn\.(norm_(added_)?[qk])\.", r"\1.\2."),),
        first_names=True,
        comfy_config=comfy_config,
    ),
    after_gelu=rf"{DOUBLE}\.(ff|ff_context)\.net\.2|{SINGLE}\.proj_out@1",
    pooled_width="pooled_projection_dim",
    packed=True,
    timestep_scale=1.0,
    rounded_timestep=(r"time_text_embed\.time_proj", 1000.0),
    sigma_table=10000,
    references=("offset", "index", "uxo"),
    text_encoders="CLIP-L and T5: use a DualCLIPLoader (type flux) and CLIP Text Encode",
    texts=CLIP_AND_T5,
)

FLUX_SCHNELL = replace(
    FLUX,
    name="flux-schnell",
    title="Flux.1 schnell",
    unsupported_config=not_schnell,
    inputs=tuple(each for each in FLUX.inputs if each[1] != "guidance"),
    shift=1.0,
    sigma_table=1000,
    tiny=MappingProxyType({**TINY, "guidance_embeds": False}),
)
"""Distilled to a few steps: no guidance, and no shift."""

FLUX_FILL = replace(
    FLUX,
    name="flux-fill",
    title="Flux.1 Fill",
    pipeline_classes=("FluxFillPipeline",),
    unsupported_config=not_fill,
    references=(),
    beside=("picture", "mask"),
    tiny=MappingProxyType({**TINY, "in_channels": 384}),
)
"""Paints anew what a mask says: use InpaintModelConditioning."""

FLUX_CONTROL = replace(
    FLUX,
    name="flux-control",
    title="Flux.1 Canny or Depth",
    pipeline_classes=("FluxControlPipeline",),
    unsupported_config=not_control,
    references=(),
    beside=("picture",),
    tiny=MappingProxyType({**TINY, "in_channels": 128}),
)
"""Follows a picture of edges or depth: use InstructPixToPixConditioning."""
