"""Lumina-Image 2.0 (Alpha-VLLM 2025, arXiv:2503.21758)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .flux import LATENT
from .spec import FamilySpec
from .texts import GEMMA2
from .written import Fused, Rebuilt, Shapes, Variant, count_blocks

PATCH = (2, 2)
REFINERS = 2
TOGETHER = 3
"""So many heads of queries share a head of keys and values."""
PLACES = (4097, 1024, 1024)
"""Text tokens, rows and columns that there are positions for: the longest prompt, and the largest picture of ComfyUI."""
BLOCK = r"(?:noise_refiner|context_refiner|layers)\.\d+"
MODULATED = r"(?:noise_refiner|layers)\.\d+"
RENAMES = (
    (r"^cap_embedder\.", "time_caption_embed.caption_embedder."),
    (r"^t_embedder\.mlp\.0\.", "time_caption_embed.timestep_embedder.linear_1."),
    (r"^t_embedder\.mlp\.2\.", "time_caption_embed.timestep_embedder.linear_2."),
    (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear_1."),
    (r"^final_layer\.linear\.", "norm_out.linear_2."),
    (rf"^({BLOCK})\.attention\.out\.", r"\1.attn.to_out.0."),
    (rf"^({BLOCK})\.attention\.([qk])_norm\.", r"\1.attn.norm_\2."),
    (rf"^({MODULATED})\.attention_norm1\.", r"\1.norm1.norm."),
    (rf"^({BLOCK})\.attention_norm([12])\.", r"\1.norm\2."),
    (rf"^({MODULATED})\.adaLN_modulation\.1\.", r"\1.norm1.linear."),
    (rf"^({BLOCK}\.feed_forward)\.w([123])\.", r"\1.linear_\2."),
)


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, patch_channels = shapes["x_embedder.weight"]
    [head_dim] = shapes["layers.0.attn.norm_q.weight"]
    axis = head_dim // 3 // 2 * 2
    return {
        "patch_size": PATCH[0],
        "in_channels": patch_channels // (PATCH[0] * PATCH[1]),
        "hidden_size": width,
        "num_layers": count_blocks(shapes, "layers"),
        "num_refiner_layers": count_blocks(shapes, "noise_refiner"),
        "num_attention_heads": width // head_dim,
        "num_kv_heads": shapes["layers.0.attn.to_k.weight"][0] // head_dim,
        "axes_dim_rope": (head_dim - 2 * axis, axis, axis),
        "cap_feat_dim": shapes["time_caption_embed.caption_embedder.1.weight"][1],
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Lumina-Image 2.0; empty when it is."""
    refiners, heads = config.get("num_refiner_layers", REFINERS), config.get("num_attention_heads", 24)
    shared = config.get("num_kv_heads", 8)
    if (refiners, heads) == (REFINERS, TOGETHER * shared):
        return ""
    return f"a Lumina 2 of {refiners} refiner layers and {heads} heads, which share {shared} heads of keys and values"


TINY = MappingProxyType(
    {
        "patch_size": 2,
        "in_channels": 16,
        "hidden_size": 192,
        "num_layers": 2,
        "num_refiner_layers": REFINERS,
        "num_attention_heads": 12,
        "num_kv_heads": 4,
        "axes_dim_rope": (8, 4, 4),
        "cap_feat_dim": 64,
    }
)
"""For tests: 12 heads of 16, of which 3 share a key and a value, 2 blocks behind two of each refiner."""

LUMINA2 = FamilySpec(
    name="lumina2",
    title="Lumina-Image 2.0",
    pipeline_classes=("Lumina2Pipeline", "Lumina2Text2ImgPipeline"),
    transformer_class="Lumina2Transformer2DModel",
    signature=(
        "x_embedder.weight",
        "time_caption_embed.caption_embedder.1.weight",
        "noise_refiner.0.norm1.linear.weight",
        "context_refiner.0.norm1.weight",
        "layers.0.attn.to_q.weight",
        "layers.0.feed_forward.linear_1.weight",
        "norm_out.linear_2.weight",
    ),
    variants=(
        Variant("NewBie", "clip_text_pooled_proj.0.weight"),
        Variant("OmniGen2", "ref_image_patch_embedder.weight"),
    ),
    renames=RENAMES,
    fused=(
        Fused(
            rf"({BLOCK})\.attention\.qkv",
            blocks=(TOGETHER, 1, 1),
            parts=tuple((rf"\1.attn.to_{name}", (block,)) for block, name in enumerate("qkv")),
        ),
    ),
    unused=r"norm_final\.weight",
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="num_attention_heads",
    width="hidden_size",
    layers="num_layers",
    text_width="cap_feat_dim",
    blocks=("noise_refiner", "context_refiner", "layers"),
    split=TokenSplit(
        split=(
            TokenPlace(r"context_refiner\.0", "hidden_states", stream="text"),
            TokenPlace(r"context_refiner\.\d+", "image_rotary_emb", stream="text"),
            TokenPlace(r"noise_refiner\.0", "hidden_states"),
            TokenPlace(r"noise_refiner\.\d+", "image_rotary_emb"),
            TokenPlace(r"layers\.0", "hidden_states", stream="text", behind=("image",)),
            TokenPlace(r"layers\.\d+", "image_rotary_emb", stream="text", behind=("image",)),
        ),
        gathered=(
            TokenPlace(rf"context_refiner\.{REFINERS - 1}", stream="text"),
            TokenPlace(rf"noise_refiner\.{REFINERS - 1}"),
            TokenPlace("norm_out", stream="text", behind=("image",)),
        ),
        masks=(TokenPlace(r"context_refiner\.\d+", "attention_mask", stream="text"),),
        joined=("text", "image"),
        alone=((r"noise_refiner\..*", "image"), (r"context_refiner\..*", "text")),
    ),
    self_attention=rf"{BLOCK}\.attn",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"{BLOCK}\.attn\.to_q", "column", together=TOGETHER),
            LinearShard(rf"{BLOCK}\.attn\.to_[kv]", "column"),
            LinearShard(rf"{BLOCK}\.attn\.to_out\.0", "row", together=TOGETHER),
            LinearShard(rf"{BLOCK}\.feed_forward\.linear_[13]", "column"),
            LinearShard(rf"{BLOCK}\.feed_forward\.linear_2", "row"),
            LinearShard(rf"{MODULATED}\.norm1\.linear", "gather"),
        ),
        attentions=rf"{BLOCK}\.attn",
        together=TOGETHER,
    ),
    patch=PATCH,
    inputs=(("encoder_hidden_states", "embedding"), ("encoder_attention_mask", "whole_mask")),
    keep_float32=(),
    rebuilt=(
        Rebuilt(
            "rope_embedder",
            (
                ("theta", lambda _: 10000),
                ("axes_dim", "axes_dim_rope"),
                ("axes_lens", lambda _: PLACES),
                ("patch_size", "patch_size"),
            ),
        ),
    ),
    prediction="reversed velocity",
    shift=6.0,
    latent=LATENT,
    vae_class="AutoencoderKL",
    activations=Activations(
        mlp=Moment(6, hidden=3),
        attention=Moment(2, cut=1),
        widened=Moment(6, hidden=5),
        undealt=1,  # words and picture, side by side
        item_tables=4,  # of the picture alone, and behind its words: complex numbers in float64
        last=Moment(6, hidden=1),
    ),
    text_length=512,
    tiny=TINY,
    timestep_scale=1.0,
    text_encoders="Gemma 2: use a CLIP Loader (type lumina2) and CLIP Text Encode",
    texts=GEMMA2,
)
"""The class puts text and picture together by their whole numbers: they are gathered behind the refiners, and dealt anew."""
