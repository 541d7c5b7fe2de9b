"""Z-Image: Turbo and base (Tongyi-MAI 2025, arXiv:2511.22699)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .flux import LATENT
from .spec import FamilySpec
from .texts import QWEN3
from .written import Fused, NunchakuFile, PackedLinear, Rebuilt, Shapes, Variant, count_blocks

PATCH = (2, 2)
BLOCK = r"(?:noise_refiner|context_refiner|layers)\.\d+"
RENAMES = (
    (r"^x_embedder\.", "all_x_embedder.2-1."),
    (r"^final_layer\.", "all_final_layer.2-1."),
    (rf"^({BLOCK}\.attention)\.out\.", r"\1.to_out.0."),
    (rf"^({BLOCK}\.attention)\.([qk])_norm\.", r"\1.norm_\2."),
    (rf"^({BLOCK}\.feed_forward)\.net\.2\.", r"\1.w2."),
)
"""From ComfyUI's names, which are Lumina 2's; the authors' own are the class's. Nunchaku's files have another feed-forward
part, in refiners that are not in 4 bits too.
"""
NUNCHAKU = {
    "attention.to_qkv": tuple(f"attention.to_{name}" for name in "qkv"),
    "feed_forward.net.0.proj": ("feed_forward.w3", "feed_forward.w1"),
    "feed_forward.net.2": ("feed_forward.w2",),
}


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, patch_channels = shapes["all_x_embedder.2-1.weight"]
    [head_dim] = shapes["layers.0.attention.norm_q.weight"]
    heads = width // head_dim
    return {
        "all_patch_size": PATCH[:1],
        "all_f_patch_size": (1,),
        "in_channels": patch_channels // (PATCH[0] * PATCH[1]),
        "dim": width,
        "n_layers": count_blocks(shapes, "layers"),
        "n_refiner_layers": count_blocks(shapes, "noise_refiner"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        "axes_dims": (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
        "axes_lens": (1536, 512, 512),
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Z-Image; empty when it is."""
    if config.get("siglip_feat_dim"):
        return "Z-Image Omni"
    channels = config.get("in_channels", LATENT.channels)
    return "" if channels == LATENT.channels else f"a Z-Image of {channels} channels"


TINY = MappingProxyType(
    {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 16,
        "dim": 192,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
        "cap_feat_dim": 64,
        "axes_dims": (12, 18, 18),
    }
)
"""For tests: 4 heads of 48, 2 blocks behind one of each refiner."""

ZIMAGE = FamilySpec(
    name="zimage",
    title="Z-Image",
    pipeline_classes=("ZImagePipeline",),
    transformer_class="ZImageTransformer2DModel",
    signature=(
        "all_x_embedder.2-1.weight",
        "cap_embedder.1.weight",
        "cap_pad_token",
        "noise_refiner.0.adaLN_modulation.0.weight",
        "context_refiner.0.attention.to_q.weight",
        "layers.0.adaLN_modulation.0.weight",
        "layers.0.attention.norm_q.weight",
        "all_final_layer.2-1.linear.weight",
    ),
    variants=(
        Variant("Z-Image Omni", "siglip_embedder.0.weight"),
        Variant("a Z-Image that works on pixels", "dec_net.cond_embed.weight"),
    ),
    renames=RENAMES,
    fused=(
        Fused(
            rf"({BLOCK}\.attention)\.qkv",
            blocks=(1, 1, 1),
            parts=tuple((rf"\1.to_{name}", (block,)) for block, name in enumerate("qkv")),
        ),
        Fused(
            rf"({BLOCK}\.feed_forward)\.net\.0\.proj",
            blocks=(1, 1),
            parts=((r"\1.w3", (0,)), (r"\1.w1", (1,))),
        ),
    ),
    nunchaku=tuple(
        PackedLinear(f"{blocks}.{{}}.{stored}", tuple(f"{blocks}.{{}}.{name}" for name in names))
        for blocks in ("noise_refiner", "context_refiner", "layers")
        for stored, names in NUNCHAKU.items()
    ),
    nunchaku_file=NunchakuFile("NunchakuZImageTransformer2DModel"),
    unused=r"norm_final\.weight",
    config_from=config_from,
    unsupported_config=unsupported_config,
    heads="n_heads",
    width="dim",
    layers="n_layers",
    text_width="cap_feat_dim",
    blocks=("noise_refiner", "context_refiner", "layers"),
    split=TokenSplit(
        split=(
            TokenPlace(r"noise_refiner\.0", "x"),
            TokenPlace(r"noise_refiner\.\d+", "freqs_cis"),
            TokenPlace(r"context_refiner\.0", "x", stream="text"),
            TokenPlace(r"context_refiner\.\d+", "freqs_cis", stream="text"),
            TokenPlace(r"layers\.\d+", "freqs_cis", behind=("text",)),
        ),
        gathered=(TokenPlace(r"all_final_layer\.2-1", behind=("text",)),),
        alone=((r"noise_refiner\..*", "image"), (r"context_refiner\..*", "text")),
    ),
    self_attention=rf"{BLOCK}\.attention",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"{BLOCK}\.attention\.to_[qkv]", "column"),
            LinearShard(rf"{BLOCK}\.attention\.to_out\.0", "row"),
            LinearShard(rf"{BLOCK}\.feed_forward\.w[13]", "column"),
            LinearShard(rf"{BLOCK}\.feed_forward\.w2", "row"),
            LinearShard(rf"{BLOCK}\.adaLN_modulation\.0", "gather"),
        ),
        attentions=rf"{BLOCK}\.attention",
    ),
    patch=PATCH,
    inputs=(("cap_feats", "embedding"),),
    latent_input="x",
    time_input="t",
    listed=True,
    keep_float32=(),
    rebuilt=(Rebuilt("rope_embedder", (("axes", "axes_dims"), ("theta", "rope_theta")), stand_in="axis positions"),),
    prediction="reversed velocity",
    shift=3.0,
    latent=LATENT,
    vae_class="AutoencoderKL",
    activations=Activations(
        mlp=Moment(5, hidden=4),
        attention=Moment(2),
        item_tables=2,  # of the picture alone, and behind its words: complex numbers in float32
        last=Moment(5, hidden=1),
    ),
    text_length=512,
    token_multiple=32,
    tiny=TINY,
    timestep_scale=1.0,
    text_encoders="Qwen3-4B: use a CLIP Loader (type lumina2) and CLIP Text Encode",
    texts=QWEN3,
)
