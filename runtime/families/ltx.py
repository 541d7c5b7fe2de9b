"""LTX-Video 0.9 to 0.9.8, 2B and 13B (Lightricks 2024, arXiv:2501.00103)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TensorSplit, TokenPlace, TokenSplit
from .spec import FamilySpec, LatentFormat
from .texts import MASKED_T5
from .written import Shapes, Variant, count_blocks

HEADS = 32
"""The same in every published size; a checkpoint does not say it."""

RENAMES = (
    (r"^patchify_proj\.", "proj_in."),
    (r"^adaln_single\.", "time_embed."),
    (r"^(transformer_blocks\.\d+\.attn[12])\.([qk])_norm\.", r"\1.norm_\2."),
)


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels = shapes["proj_in.weight"]
    return {
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0],
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": HEADS,
        "attention_head_dim": width // HEADS,
        "cross_attention_dim": shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        "num_layers": count_blocks(shapes, "transformer_blocks"),
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not LTX-Video; empty when it is."""
    channels = config.get("in_channels", 128)
    return "" if channels == 128 else f"an LTX-Video of {channels} channels"


def is_causal(metadata: Mapping[str, str]) -> bool:
    """Whether a file says that its first frame stands for one of the video, and each other for eight: from 0.9.5 on."""
    try:
        config = json.loads(metadata.get("config", "{}"))
    except (ValueError, RecursionError):
        return False
    transformer = config.get("transformer") if isinstance(config, dict) else None
    return isinstance(transformer, dict) and transformer.get("causal_temporal_positioning") is True


LATENT = LatentFormat(
    channels=128,
    dims=3,
    spatial=32,
    temporal=8,
    mean=(0.0,) * 128,
    std=(1.0,) * 128,
    rgb=(
        (0.011202, -0.00063815, -0.010021), (0.086031, 0.065813, 0.00095409), (-0.012576, -0.0075734, -0.0040528), (0.0094063, -0.0021688, 0.0026093),
        (0.0037636, 0.012765, 0.0091548), (0.021024, -0.0052973, 0.0034373), (-0.0088896, -0.019703, -0.018761), (-0.01316, -0.010523, 0.0019709),
        (-0.0015152, -0.0069891, -0.007581), (-0.0017247, 0.0004656, -0.0033839), (0.013617, 0.0047077, -0.0020045), (0.010256, 0.0077318, 0.013948),
        (-0.016108, -0.0062151, 0.0011561), (0.0073407, 0.015628, 0.00044865), (0.00095357, -0.0029518, -0.01476), (0.019143, 0.010868, 0.012264),
        (0.0044575, 3.6682e-05, -0.0068508), (-0.00045681, 0.003257, 0.0077929), (0.033902, 0.033405, 0.037454), (-0.023001, -0.0024877, -0.0031033),
        (0.050265, 0.038841, 0.033539), (-0.0041018, -0.0011095, 0.0015859), (-0.12689, -0.13107, -0.21005), (0.026276, 0.014189, -0.0035963),
        (-0.0048679, 0.0088486, 0.0078029), (-0.001661, -0.0048597, -0.005206), (-0.002101, 0.002361, 0.0093796), (-0.022482, -0.021305, -0.015087),
        (-0.015753, -0.010646, -0.0065083), (-0.0046975, 0.0050288, -0.006739), (0.011951, 0.020712, 0.016191), (-0.0063704, -0.0084827, -0.0095483),
        (0.007261, -0.0099326, -0.022978), (-0.00091904, 0.0062882, 0.009572), (-0.037178, -0.037123, -0.056713), (-0.13373, -0.1072, -0.053801),
        (-0.0053702, 0.0081256, 0.0088397), (-0.15247, -0.21437, -0.21843), (0.031441, 0.0070335, -0.0097541), (0.0021528, -0.0089817, -0.021023),
        (0.0038461, -0.0058957, -0.015014), (-0.004347, -0.01294, -0.015972), (-0.0054781, -0.010842, -0.0030204), (-0.0065347, 0.0030806, -0.010163),
        (-0.0050414, -0.0071503, -0.00089686), (-0.0085851, -0.0024351, 0.0010674), (-0.0090016, -0.0096493, 0.0015692), (0.0050914, 0.012099, 0.019968),
        (0.013758, 0.011669, 0.0081958), (-0.010518, -0.011575, -0.0041307), (-0.02841, -0.031266, -0.022149), (0.0029336, 0.036511, 0.018717),
        (-0.016703, -0.016696, -0.0044529), (0.048818, 0.040063, 0.008741), (-0.015066, -0.00057328, 0.0029785), (-0.017613, -0.0081034, 0.013086),
        (-0.0092633, 0.010803, -0.0063489), (0.0030851, 0.0004775, 0.012347), (-0.022785, -0.023043, -0.026005), (-0.024787, -0.015389, -0.022104),
        (-0.023572, 0.0010544, 0.012361), (-0.0078915, -0.0012271, -0.0060968), (-0.011478, -0.0012543, 0.0062679), (-0.054229, 0.026644, 0.0063394),
        (0.0044216, -0.0073338, -0.010464), (-0.0045013, 0.0016082, 0.01442), (0.013673, 0.0088877, 0.0041253), (-0.010145, 0.0090072, 0.015695),
        (-0.0056234, 0.0011847, 0.0081261), (-0.0037171, -0.0053538, 0.001259), (0.029476, 0.021424, 0.030424), (-0.034925, -0.02434, -0.025316),
        (-0.034127, -0.022406, -0.010589), (-0.017342, -0.013249, -0.010719), (-0.0021478, -0.0086051, -0.0029878), (0.0012089, -0.0042391, -0.0068569),
        (0.00090411, -0.0066886, -6.7547e-05), (0.016048, -0.010057, -0.028929), (0.001229, 0.010163, 0.018861), (0.017264, 0.00027257, 0.013785),
        (-0.013482, -0.0036427, 0.00067481), (0.0046782, -0.0052423, 0.0024467), (-0.0059113, -0.0062244, -0.0018162), (0.015496, 0.014582, 0.0019514),
        (0.0074958, 0.0015886, -0.0082305), (0.019086, 0.001636, -0.0039674), (-0.0057021, -0.0027307, -0.0041066), (0.001745, 0.014602, 0.025794),
        (-0.00082788, 0.0022902, 0.0045161), (0.011632, 0.0089193, -0.0072813), (0.0075721, 0.0026784, 0.011393), (0.0051939, 0.0036903, 0.014049),
        (-0.018383, -0.022529, -0.024477), (0.00058842, -0.0057874, -0.01477), (-0.016125, -0.0086101, -0.014533), (0.02054, 0.020729, 0.0064338),
        (0.0033587, -0.011226, -0.016444), (-0.0014742, -0.010489, 0.0017097), (0.02813, 0.023546, 0.032791), (-0.018532, -0.012842, -0.0087756),
        (-0.0080533, -0.010771, -0.017536), (-0.0039009, 0.01615, 0.033359), (-0.0074554, -0.014154, -0.006191), (0.0034734, -0.01137, -0.010581),
        (0.011476, 0.0039281, 0.0028231), (0.0071639, -0.0014741, -0.0038066), (0.002225, -0.0087552, -0.0095719), (0.024146, 0.021696, 0.028056),
        (-0.0054365, -0.024291, -0.017802), (0.0074263, 0.01051, 0.012705), (0.0062669, 0.0062658, 0.019211), (0.016378, 0.0094933, 0.0066971),
        (0.017173, 0.023601, 0.023296), (-0.014568, -0.0098279, -0.011556), (0.014431, 0.01443, 0.0066362), (-0.006823, 0.018863, 0.014555),
        (0.0061156, 0.00347, -0.0026662), (-0.0026983, -0.0059402, -0.0092276), (0.010235, 0.0074173, -0.0076243), (-0.013255, 0.019322, -0.00092153),
        (0.0024222, -0.0048039, -0.015759), (0.026244, 0.025951, 0.020249), (0.015711, 0.018498, 0.0027407), (-0.0021714, 0.0047214, -0.022443),
        (-0.0074747, 0.0074166, 0.01443), (-0.0083906, -0.0079776, 0.0097927), (0.038321, 0.0096622, -0.019268), (-0.014605, -0.0067032, 0.0039675),
    ),
    rgb_bias=(-0.0571, -0.1657, -0.2512),
)  # fmt: skip

TINY = MappingProxyType(
    {
        "in_channels": 128,
        "out_channels": 128,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "cross_attention_dim": 128,
        "num_layers": 2,
        "caption_channels": 64,
    }
)
"""For tests: 4 heads of 32, 2 blocks."""

BLOCK = r"transformer_blocks\.\d+"

LTX = FamilySpec(
    name="ltx",
    title="LTX-Video 0.9",
    pipeline_classes=("LTXPipeline", "LTXImageToVideoPipeline"),
    transformer_class="LTXVideoTransformer3DModel",
    signature=(
        "proj_in.weight",
        "caption_projection.linear_1.weight",
        "time_embed.emb.timestep_embedder.linear_1.weight",
        "transformer_blocks.0.attn1.norm_q.weight",
        "transformer_blocks.0.attn2.to_k.weight",
        "transformer_blocks.0.scale_shift_table",
        "proj_out.weight",
    ),
    variants=(
        Variant("LTX-2", "audio_adaln_single.linear.weight"),
        Variant("LTX-2", "audio_proj_in.weight"),
    ),
    renames=RENAMES,
    config_from=config_from,
    unsupported_config=unsupported_config,
    told_by=lambda metadata: not is_causal(metadata),
    heads="num_attention_heads",
    head_dim="attention_head_dim",
    layers="num_layers",
    text_width="caption_channels",
    blocks=("transformer_blocks",),
    split=TokenSplit(
        split=(TokenPlace("", "hidden_states"), TokenPlace("", "timestep"), TokenPlace("rope")),
        gathered=(TokenPlace("proj_out"),),
        joined=("image",),
    ),
    self_attention=rf"{BLOCK}\.attn1",
    tensor=TensorSplit(
        linears=(
            LinearShard(rf"{BLOCK}\.attn[12]\.to_[qkv]", "column"),
            LinearShard(rf"{BLOCK}\.attn[12]\.to_out\.0", "row"),
            LinearShard(rf"{BLOCK}\.ff\.net\.0\.proj", "column"),
            LinearShard(rf"{BLOCK}\.ff\.net\.2", "row"),
            LinearShard(r"time_embed\.linear", "gather"),
            LinearShard(r"caption_projection\.linear_1", "column"),
            LinearShard(r"caption_projection\.linear_2", "row"),
        ),
        attentions=rf"{BLOCK}\.attn[12]",
        norms=rf"{BLOCK}\.attn[12]\.norm_[qk]",
        tables="rope",
    ),
    patch=(1, 1, 1),
    inputs=(
        ("encoder_hidden_states", "embedding"),
        ("encoder_attention_mask", "attention_mask"),
        ("video_coords", "video_places"),
    ),
    keep_float32=(),
    rebuilt=(),
    prediction="velocity",
    shift=math.exp(2.37),
    sigma_table=10000,
    latent=LATENT,
    vae_class="",
    text_length=128,
    tiny=TINY,
    after_gelu=rf"{BLOCK}\.ff\.net\.2",
    packed=True,
    levels="token",
    sees_kept_clean=True,
    activations=Activations(mlp=Moment(17, hidden=2, text=0), attention=Moment(15, text=0), tables=2),
    text_encoders="T5: use a CLIP Loader (type ltxv) and CLIP Text Encode",
    texts=MASKED_T5,
)

LTX_CAUSAL = replace(
    LTX,
    name="ltx-0.9.5",
    title="LTX-Video 0.9.5 or newer",
    pipeline_classes=("LTXConditionPipeline",),
    told_by=is_causal,
    inputs=(*LTX.inputs[:2], ("video_coords", "causal_video_places")),
)
"""Its first frame stands for one of the video. The tensors are those of 0.9: the file, or its folder, says which it is."""
