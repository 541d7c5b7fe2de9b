"""Wan 2.1 and 2.2, picture to video: I2V and first-last frame, the A14B experts, and TI2V 5B, which takes either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .cuts import Activations, LinearShard, Moment, TokenPlace
from .spec import LatentFormat
from .wan import TINY, WAN, channels_of, described

BESIDE = 16 + 4
"""Channels beside the latent's own: the picture, and which of the frames that one of the latent stands for are given."""


def not_i2v(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Wan 2.1 I2V or FLF2V; empty when it is."""
    return "" if channels_of(config) == (16 + BESIDE, 16, True) else described(config)


def not_i2v_22(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Wan 2.2 I2V; empty when it is."""
    return "" if channels_of(config) == (16 + BESIDE, 16, False) else described(config)


def not_ti2v(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Wan 2.2 TI2V 5B; empty when it is."""
    return "" if channels_of(config) == (48, 48, False) else described(config)


LATENT_22 = LatentFormat(
    channels=48,
    dims=3,
    spatial=16,
    temporal=4,
    mean=(
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    std=(
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744
    ),
    rgb=(
        (0.0119, 0.0103, 0.0046), (-0.1062, -0.0504, 0.0165), (0.0140, 0.0409, 0.0491), (-0.0813, -0.0677, 0.0607),
        (0.0656, 0.0851, 0.0808), (0.0264, 0.0463, 0.0912), (0.0295, 0.0326, 0.0590), (-0.0244, -0.0270, 0.0025),
        (0.0443, -0.0102, 0.0288), (-0.0465, -0.0090, -0.0205), (0.0359, 0.0236, 0.0082), (-0.0776, 0.0854, 0.1048),
        (0.0564, 0.0264, 0.0561), (0.0006, 0.0594, 0.0418), (-0.0319, -0.0542, -0.0637), (-0.0268, 0.0024, 0.0260),
        (0.0539, 0.0265, 0.0358), (-0.0359, -0.0312, -0.0287), (-0.0285, -0.1032, -0.1237), (0.1041, 0.0537, 0.0622),
        (-0.0086, -0.0374, -0.0051), (0.0390, 0.0670, 0.2863), (0.0069, 0.0144, 0.0082), (0.0006, -0.0167, 0.0079),
        (0.0313, -0.0574, -0.0232), (-0.1454, -0.0902, -0.0481), (0.0714, 0.0827, 0.0447), (-0.0304, -0.0574, -0.0196),
        (0.0401, 0.0384, 0.0204), (-0.0758, -0.0297, -0.0014), (0.0568, 0.1307, 0.1372), (-0.0055, -0.0310, -0.0380),
        (0.0239, -0.0305, 0.0325), (-0.0663, -0.0673, -0.0140), (-0.0416, -0.0047, -0.0023), (0.0166, 0.0112, -0.0093),
        (-0.0211, 0.0011, 0.0331), (0.1833, 0.1466, 0.2250), (-0.0368, 0.0370, 0.0295), (-0.3441, -0.3543, -0.2008),
        (-0.0479, -0.0489, -0.0420), (-0.0660, -0.0153, 0.0800), (-0.0101, 0.0068, 0.0156), (-0.0690, -0.0452, -0.0927),
        (-0.0145, 0.0041, 0.0015), (0.0421, 0.0451, 0.0373), (0.0504, -0.0483, -0.0356), (-0.0837, 0.0168, 0.0055),
    ),
    rgb_bias=(0.0317, -0.0878, -0.1388),
    preview_decoder="lighttaew2_2",
)  # fmt: skip
"""Of the VAE of Wan 2.2, which TI2V 5B alone works with."""

PICTURE_LINEARS = (
    LinearShard(r"blocks\.\d+\.attn2\.add_[kv]_proj", "column"),
    LinearShard(r"condition_embedder\.image_embedder\.ff\.net\.0\.proj", "column"),
    LinearShard(r"condition_embedder\.image_embedder\.ff\.net\.2", "row"),
)
WAN_I2V = replace(
    WAN,
    name="wan-i2v",
    title="Wan 2.1 image to video",
    pipeline_classes=("WanImageToVideoPipeline",),
    unsupported_config=not_i2v,
    inputs=(*WAN.inputs, ("encoder_hidden_states_image", "clip_vision")),
    tensor=replace(WAN.tensor, linears=(*WAN.tensor.linears, *PICTURE_LINEARS)),
    keep_float32=(*WAN.keep_float32, "norm1"),
    beside=("given frames", "picture"),
    vision_width="image_dim",
    picture_tokens="condition_embedder",
    activations=replace(WAN.activations, mlp=Moment(4, hidden=2, text=3)),
    rare=("condition_embedder.image_embedder.pos_embed",),
    unused=r"blocks\.\d+\.attn2\.norm_added_q\.weight",
    boundary=0.0,
    tiny=MappingProxyType({**TINY, "in_channels": 36, "text_dim": 64, "image_dim": 48, "added_kv_proj_dim": 128}),
)
"""Reads CLIP vision of its first frame, or of its first and last (FLF2V)."""

WAN22_I2V = replace(
    WAN,
    name="wan2.2-i2v",
    title="Wan 2.2 image to video",
    pipeline_classes=("WanImageToVideoPipeline",),
    unsupported_config=not_i2v_22,
    beside=("given frames", "picture"),
    boundary=0.9,
    tiny=MappingProxyType({**TINY, "in_channels": 36, "text_dim": 64}),
)

WAN22_TI2V = replace(
    WAN,
    name="wan2.2-ti2v",
    title="Wan 2.2 TI2V 5B",
    unsupported_config=not_ti2v,
    split=replace(WAN.split, split=(*WAN.split.split, TokenPlace("", "timestep")), joined=("image",)),
    latent=LATENT_22,
    activations=Activations(
        mlp=Moment(10, hidden=2, text=1),
        of_text=Moment(1, cut=3, text=5),
        attention=Moment(8, text=0),
        widened=Moment(20, text=1),
        undealt=1,
        float32=6,  # what each token is modulated by
    ),
    levels="frame",
    sees_kept_clean=True,
    boundary=0.0,
    tiny=MappingProxyType({**TINY, "in_channels": 48, "out_channels": 48, "text_dim": 64}),
)
"""Told the noise of each frame apart: those that are given have none (Wan22ImageToVideoLatent)."""
