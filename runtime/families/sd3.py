"""Stable Diffusion 3 and 3.5: medium and large (Esser et al. 2024, arXiv:2403.03206)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .spec import FamilySpec, LatentFormat
from .texts import CLIPS_AND_T5
from .written import Fused, Shapes, Variant

PATCH = (2, 2)
HEAD_DIM = 64
"""The same in every published size; a checkpoint without norms of queries and keys (3.0) does not say it."""
BLOCK = r"transformer_blocks\.\d+"
RENAMES = (
    (r"^pos_embed$", "pos_embed.pos_embed"),
    (r"^x_embedder\.proj\.", "pos_embed.proj."),
    (r"^t_embedder\.mlp\.", "time_text_embed.timestep_embedder."),
    (r"^y_embedder\.mlp\.", "time_text_embed.text_embedder."),
    (r"^(time_text_embed\.\w+)\.0\.", r"\1.linear_1."),
    (r"^(time_text_embed\.\w+)\.2\.", r"\1.linear_2."),
    (r"^final_layer\.linear\.", "proj_out."),
    (r"^joint_blocks\.", "transformer_blocks."),
    (rf"^({BLOCK})\.x_block\.(attn2?)\.proj\.", r"\1.\2.to_out.0."),
    (rf"^({BLOCK})\.x_block\.(attn2?)\.ln_([qk])\.", r"\1.\2.norm_\3."),
    (rf"^({BLOCK})\.context_block\.attn\.proj\.", r"\1.attn.to_add_out."),
    (rf"^({BLOCK})\.context_block\.attn\.ln_([qk])\.", r"\1.attn.norm_added_\2."),
    (rf"^({BLOCK})\.x_block\.adaLN_modulation\.1\.", r"\1.norm1.linear."),
    (rf"^({BLOCK})\.x_block\.mlp\.", r"\1.ff."),
    (rf"^({BLOCK})\.context_block\.mlp\.", r"\1.ff_context."),
    (rf"^({BLOCK}\.ff(_context)?)\.fc1\.", r"\1.net.0.proj."),
    (rf"^({BLOCK}\.ff(_context)?)\.fc2\.", r"\1.net.2."),
)
_QKV = tuple((name, (block,)) for block, name in enumerate("qkv"))
FUSED = (
    Fused(rf"({BLOCK})\.x_block\.(attn2?)\.qkv", (1, 1, 1), tuple((rf"\1.\2.to_{each}", own) for each, own in _QKV)),
    Fused(
        rf"({BLOCK})\.context_block\.attn\.qkv",
        blocks=(1, 1, 1),
        parts=tuple((rf"\1.attn.add_{each}_proj", own) for each, own in _QKV),
    ),
    Fused(
        rf"({BLOCK})\.context_block\.adaLN_modulation\.1",
        blocks=(1, 1),
        parts=((r"\1.norm1_context.linear", (1, 0)),),
        unless=r"\1.attn.to_add_out.weight",
    ),
    Fused(rf"({BLOCK})\.context_block\.adaLN_modulation\.1", (1,), ((r"\1.norm1_context.linear", (0,)),)),
    Fused(r"final_layer\.adaLN_modulation\.1", blocks=(1, 1), parts=(("norm_out.linear", (1, 0)),)),
)
"""The modulations of the last layer, and of the text in the last block, have shift before scale there, and scale first in
diffusers.
"""


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    _, places, width = shapes["pos_embed.pos_embed"]
    normed = shapes.get("transformer_blocks.0.attn.norm_q.weight")
    head_dim = normed[0] if normed else HEAD_DIM
    caption_width, text_width = shapes["context_embedder.weight"]
    return {
        "patch_size": PATCH[0],
        "in_channels": shapes["pos_embed.proj.weight"][1],
        "out_channels": shapes["proj_out.weight"][0] // (PATCH[0] * PATCH[1]),
        "num_layers": len(_numbers(shapes, r"norm1\.linear\.weight")),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": text_width,
        "caption_projection_dim": caption_width,
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "pos_embed_max_size": math.isqrt(places),
        "dual_attention_layers": _numbers(shapes, r"attn2\.to_q\.weight"),
        "qk_norm": "rms_norm" if normed else None,
    }


def _numbers(shapes: Shapes, tensor: str) -> tuple[int, ...]:
    """The blocks that have such a tensor."""
    found = (re.fullmatch(rf"transformer_blocks\.(\d+)\.{tensor}", name) for name in shapes)
    return tuple(sorted(int(each[1]) for each in found if each))


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Stable Diffusion 3 or 3.5; empty when it is."""
    channels = config.get("in_channels", 16), config.get("out_channels", 16)
    return "" if channels == (16, 16) else "a Stable Diffusion 3 of {} input and {} output channels".format(*channels)


LATENT = LatentFormat(
    channels=16,
    dims=2,
    spatial=8,
    temporal=1,
    mean=(0.0609,) * 16,
    std=(1 / 1.5305,) * 16,
    rgb=(
        (-0.0922, -0.0175, 0.0749), (0.0311, 0.0633, 0.0954), (0.1994, 0.0927, 0.0458), (0.0856, 0.0339, 0.0902),
        (0.0587, 0.0272, -0.0496), (-0.0006, 0.1104, 0.0309), (0.0978, 0.0306, 0.0427), (-0.0042, 0.1038, 0.1358),
        (-0.0194, 0.0020, 0.0669), (-0.0488, 0.0130, -0.0268), (0.0922, 0.0988, 0.0951), (-0.0278, 0.0524, -0.0542),
        (0.0332, 0.0456, 0.0895), (-0.0069, -0.0030, -0.0810), (-0.0596, -0.0465, -0.0293), (-0.1448, -0.1463, -0.1189),
    ),
    rgb_bias=(0.2394, 0.2135, 0.1925),
    preview_decoder="taesd3_decoder",
)  # fmt: skip

TINY = MappingProxyType(
    {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 3,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 128,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
)
"""For tests: 4 heads of 32, 3 blocks; the first attends twice, as in 3.5 medium, and the last drops the text."""

SD3 = FamilySpec(
    name="sd3",
    title="Stable Diffusion 3 or 3.5",
    pipeline_classes=("StableDiffusion3Pipeline",),
    transformer_class="SD3Transformer2DModel",
    signature=(
        "pos_embed.pos_embed",
        "pos_embed.proj.weight",
        "context_embedder.weight",
        "time_text_embed.text_embedder.linear_1.weight",
        "transformer_blocks.0.attn.add_q_proj.weight",
        "proj_out.weight",
    ),
    variants=(Variant("a Stable Diffusion 3 ControlNet", "controlnet_blocks.0.weight"),),
    renames=RENAMES,
    fused=FUSED,
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="joint_attention_dim",
    blocks=("transformer_blocks",),
    split=TokenSplit(
        split=(TokenPlace("pos_embed"), TokenPlace("", "encoder_hidden_states", stream="text")),
        gathered=(TokenPlace("proj_out"),),
        alone=((r".*\.attn2", "image"),),
    ),
    self_attention=rf"{BLOCK}\.attn2?",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"{BLOCK}\.attn2?\.to_[qkv]", "column"),
            LinearShard(rf"{BLOCK}\.attn\.add_[qkv]_proj", "column"),
            LinearShard(rf"{BLOCK}\.attn2?\.(to_out\.0|to_add_out)", "row"),
            LinearShard(rf"{BLOCK}\.(ff|ff_context)\.net\.0\.proj", "column"),
            LinearShard(rf"{BLOCK}\.(ff|ff_context)\.net\.2", "row"),
            LinearShard(rf"{BLOCK}\.(norm1|norm1_context)\.linear", "gather"),
            LinearShard(r"norm_out\.linear", "gather"),
        ),
        attentions=rf"{BLOCK}\.attn2?",
    ),
    patch=PATCH,
    inputs=(("encoder_hidden_states", "embedding"), ("pooled_projections", "pooled")),
    keep_float32=(),
    rebuilt=(),
    prediction="velocity",
    shift=3.0,
    latent=LATENT,
    vae_class="AutoencoderKL",
    activations=Activations(
        mlp=Moment(5, hidden=2, text=3),
        of_text=Moment(4, hidden=2, text=7),
        attention=Moment(3, text=5),
        alone=Moment(5, text=3),
    ),
    text_length=512,
    tiny=TINY,
    after_gelu=rf"{BLOCK}\.(ff|ff_context)\.net\.2",
    pooled_width="pooled_projection_dim",
    positions="pos_embed_max_size",
    text_encoders="CLIP-L, CLIP-G and T5: use a TripleCLIPLoader and CLIP Text Encode",
    texts=CLIPS_AND_T5,
)
