"""Wan 2.1 and 2.2, text to picture and video (Wan Team 2025, arXiv:2503.20314).

The two experts of Wan 2.2 A14B are two checkpoints of one family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .spec import FamilySpec, LatentFormat
from .texts import UMT5
from .written import Rebuilt, Shapes, Variant

PATCH = (1, 2, 2)
HEAD_DIM = 128
"""The same in every published size; a checkpoint does not say it."""

VARIANTS = (
    Variant("Wan VACE", "vace_patch_embedding.weight"),
    Variant("Wan Fun Camera", "control_adapter.conv.weight"),
    Variant("Wan 2.2 S2V", "casual_audio_encoder.encoder.final_linear.weight"),
    Variant("HuMo", "audio_proj.audio_proj_glob_1.layer.bias"),
    Variant("Wan 2.2 Animate", "pose_patch_embedding.weight"),
    Variant("Wan 2.2 Animate", "face_adapter.fuser_blocks.0.k_norm.weight"),
    Variant("Wan 2.2 Animate", "face_adapter.0.norm_k.weight"),
    Variant("Wan Fun with a reference image", "ref_conv.weight"),
    Variant("WanDancer", "patch_embedding_global.weight"),
    Variant("Wan SCAIL", "patch_embedding_pose.weight"),
    Variant("Wan SCAIL", "patch_embedding_mask.weight"),
    Variant("SkyReels V2 with a frame rate", "fps_embedding.weight"),
    Variant("Helios", "patch_long.weight"),
    Variant("AnyFlow", "condition_embedder.delta_embedder.linear_1.weight"),
)

# In the original layout norm3 stands before norm2: the norm of cross attention is norm3 there and norm2 in diffusers.
RENAMES = (
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
    (r"^(blocks\.\d+)\.norm3\.(?=weight|bias)", r"\1.norm2."),
    (r"^(blocks\.\d+)\.ffn\.0\.", r"\1.ffn.net.0.proj."),
    (r"^(blocks\.\d+)\.ffn\.2\.", r"\1.ffn.net.2."),
    (r"^img_emb\.emb_pos$", "condition_embedder.image_embedder.pos_embed"),
    (r"^img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
    (r"^img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
    (r"^img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
    (r"^img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
    (r"^(blocks\.\d+)\.self_attn\.", r"\1.attn1."),
    (r"^(blocks\.\d+)\.cross_attn\.", r"\1.attn2."),
    (r"^(blocks\.\d+\.attn[12])\.([qkv])\.", r"\1.to_\2."),
    (r"^(blocks\.\d+\.attn[12])\.o\.", r"\1.to_out.0."),
    (r"^(blocks\.\d+\.attn2)\.([kv])_img\.", r"\1.add_\2_proj."),
    (r"^(blocks\.\d+\.attn2)\.norm_k_img\.", r"\1.norm_added_k."),
)


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels = shapes["patch_embedding.weight"][:2]
    layers = {int(found[1]) for name in shapes if (found := re.match(r"blocks\.(\d+)\.", name))}
    patch_size = 1
    for size in PATCH:
        patch_size *= size
    return {
        "patch_size": PATCH,
        "num_attention_heads": width // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0] // patch_size,
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": max(layers) + 1,
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
        **_picture_config(shapes),
    }


def _picture_config(shapes: Shapes) -> dict[str, Any]:
    """What is said of the tokens of a picture, by a model that reads them."""
    embedder = "condition_embedder.image_embedder"
    if f"{embedder}.norm1.weight" not in shapes:
        return {}
    positions = shapes.get(f"{embedder}.pos_embed", (1, None, 0))[1]
    return {
        "image_dim": shapes[f"{embedder}.norm1.weight"][0],
        "added_kv_proj_dim": shapes["blocks.0.attn2.add_k_proj.weight"][1],
        "pos_embed_seq_len": positions,
    }


def channels_of(config: Mapping[str, Any]) -> tuple[int, int, bool]:
    """How many channels go in and come out, and whether the tokens of a picture go in beside them."""
    return config.get("in_channels", 16), config.get("out_channels") or 16, bool(config.get("image_dim"))


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not text to video; empty when it is."""
    return "" if channels_of(config) == (16, 16, False) else described(config)


def described(config: Mapping[str, Any]) -> str:
    """A Wan in words."""
    channels, out, picture = channels_of(config)
    reads = "reads" if picture else "does not read"
    return f"a Wan of {channels} input and {out} output channels that {reads} CLIP vision"


LATENT = LatentFormat(
    channels=16,
    dims=3,
    spatial=8,
    temporal=4,
    mean=(
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ),
    std=(
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ),
    rgb=(
        (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.1420),
        (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
        (-0.0412, 0.0267, -0.1364), (-0.1293, 0.0740, 0.1636), (0.0680, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
        (-0.1251, 0.0927, 0.1699), (0.0060, -0.0633, 0.0005), (0.3477, 0.2275, 0.2950), (0.1984, 0.0913, 0.1861),
    ),
    rgb_bias=(-0.1835, -0.0868, -0.3360),
    preview_decoder="lighttaew2_1",
)  # fmt: skip

TINY = MappingProxyType(
    {
        "patch_size": PATCH,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 64,
        "ffn_dim": 256,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 128,
    }
)
"""For tests: 4 heads of 32, 2 blocks."""

WAN = FamilySpec(
    name="wan",
    title="Wan 2.1 or 2.2 text to video",
    pipeline_classes=("WanPipeline",),
    transformer_class="WanTransformer3DModel",
    signature=(
        "patch_embedding.weight",
        "condition_embedder.text_embedder.linear_1.weight",
        "condition_embedder.time_embedder.linear_1.weight",
        "blocks.0.attn1.to_q.weight",
        "blocks.0.ffn.net.0.proj.weight",
        "proj_out.weight",
    ),
    variants=VARIANTS,
    renames=RENAMES,
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="text_dim",
    blocks=("blocks",),
    split=TokenSplit(
        split=(TokenPlace("rope"), TokenPlace("blocks.0", "hidden_states")), gathered=(TokenPlace("proj_out"),)
    ),
    self_attention=r"blocks\.\d+\.attn1",
    tensor=TensorSplit(
        linears=(
            LinearShard(r"blocks\.\d+\.attn[12]\.to_[qkv]", "column"),
            LinearShard(r"blocks\.\d+\.attn[12]\.to_out\.0", "row"),
            LinearShard(r"blocks\.\d+\.ffn\.net\.0\.proj", "column"),
            LinearShard(r"blocks\.\d+\.ffn\.net\.2", "row"),
            LinearShard(r"condition_embedder\.time_proj", "gather"),
            LinearShard(r"condition_embedder\.text_embedder\.linear_1", "column"),
            LinearShard(r"condition_embedder\.text_embedder\.linear_2", "row"),
        ),
        attentions=r"blocks\.\d+\.attn[12]",
        norms=r"blocks\.\d+\.attn[12]\.norm_(q|k|added_k)",
    ),
    patch=PATCH,
    inputs=(("encoder_hidden_states", "embedding"),),
    keep_float32=("time_embedder", "scale_shift_table", "norm2"),
    rebuilt=(
        Rebuilt("condition_embedder.timesteps_proj", (("channels", "freq_dim"),), stand_in="timestep waves"),
        Rebuilt(
            "rope",
            (
                ("attention_head_dim", "attention_head_dim"),
                ("patch_size", "patch_size"),
                ("max_seq_len", "rope_max_seq_len"),
            ),
        ),
    ),
    positions="rope_max_seq_len",
    prediction="velocity",
    shift=8.0,
    latent=LATENT,
    vae_class="AutoencoderKLWan",
    activations=Activations(
        mlp=Moment(4, hidden=2, text=1),
        of_text=Moment(1, cut=3, text=5),  # as the keys of a prompt are made
        attention=Moment(2, text=0),
        widened=Moment(11, text=1),
        undealt=1,
    ),
    text_length=512,
    text_encoders="UMT5: use a CLIP Loader (type wan) and CLIP Text Encode",
    texts=UMT5,
    tiny=TINY,
    after_gelu=r"blocks\.\d+\.ffn\.net\.2",
    boundary=0.875,
)
