"""Single files of autoencoders: the original names and shapes, and what they say of diffusers' class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..families.spec import FamilySpec
from ..layouts import VAE_PREFIXES

Shapes = Mapping[str, tuple[int, ...]]

WAN_STAGE_BLOCKS = 4
"""Entries of one decoder stage in Wan's original list: three residual blocks and an upsampler."""
WAN22_STAGE = r"^(encoder|decoder)\.(?:down|up)samples\.(\d+)\.(down|up)samples\.(\d+)\.(\w+)\."
"""A layer of a stage in Wan 2.2's original lists: a residual block, or what changes the size."""
WAN22_PATCH = 2
"""Side of the squares of pixels that Wan 2.2's takes as one."""
WAN_RENAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.downsamples\.", ".down_blocks."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
KL_RENAMES = (
    (r"^(encoder|decoder)\.((post_)?quant_conv)\.", r"\2."),
    (r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out."),
    (r"\.down\.(\d+)\.block\.(\d+)\.", r".down_blocks.\1.resnets.\2."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.up\.(\d+)\.block\.(\d+)\.", r".up_blocks.\1.resnets.\2."),
    (r"\.up\.(\d+)\.upsample\.", r".up_blocks.\1.upsamplers.0."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
)
"""The original layouts' names -> diffusers', in this order."""


@dataclass(frozen=True)
class VaeFile:
    """A layout of single files: the class, tensors that every file has (diffusers' names), and what leads to the class.

    `renamed` gives each name of a file with diffusers' own, and leaves those that are so already. `channels` are those of
    its latents, where the class has files of several; 0 for any. `colours` are what its last layer gives for a place.
    """

    title: str
    model_class: str
    signature: tuple[str, ...]
    renamed: Callable[[Iterable[str]], dict[str, str]]
    config_from: Callable[[Shapes], dict[str, Any]]
    channels: int = 0
    colours: int = 3


def vae_file_of(family: FamilySpec) -> VaeFile | None:
    """The layout of a family's single files; None where there is none."""
    kinds = FILES.get(family.vae_class, ())
    return next((kind for kind in kinds if kind.channels in (0, family.latent.channels)), None)


def vae_part(names: Iterable[str]) -> dict[str, str]:
    """The names of a VAE in a file without a prefix, and with it; those of all tensors where none has one."""
    names = list(names)
    for prefix in VAE_PREFIXES:
        if part := {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}:
            return part
    return {name: name for name in names}


def _wan_names(names: Iterable[str]) -> dict[str, str]:
    return {_replaced(_wan_stage(name), WAN_RENAMES): name for name in names}


def _wan_stage(name: str) -> str:
    found = re.match(r"decoder\.upsamples\.(\d+)\.(.*)", name)
    if not found:
        return name
    stage, place = divmod(int(found[1]), WAN_STAGE_BLOCKS)
    kind = "upsamplers.0" if place == WAN_STAGE_BLOCKS - 1 else f"resnets.{place}"
    return f"decoder.up_blocks.{stage}.{kind}.{found[2]}"


def _wan22_names(names: Iterable[str]) -> dict[str, str]:
    return {_replaced(re.sub(WAN22_STAGE, _wan22_stage, name), WAN_RENAMES): name for name in names}


def _wan22_stage(found: re.Match[str]) -> str:
    half, stage, way, place, kind = found.groups()
    inner = f"resnets.{place}" if kind in ("residual", "shortcut") else f"{way}sampler"
    return f"{half}.{way}_blocks.{stage}.{inner}.{kind}."


def _wan22_config(shapes: Shapes) -> dict[str, Any]:
    return {
        **_wan_config(shapes),
        "base_dim": shapes["encoder.conv_in.weight"][0],
        "decoder_base_dim": shapes["decoder.norm_out.gamma"][0],
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "num_res_blocks": _count(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "is_residual": True,
        "patch_size": WAN22_PATCH,
        "scale_factor_spatial": 8 * WAN22_PATCH,
    }


def _wan_config(shapes: Shapes) -> dict[str, Any]:
    return {"base_dim": shapes["decoder.norm_out.gamma"][0], "z_dim": shapes["post_quant_conv.weight"][0]}


def _kl_names(names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    stages = [int(found[1]) for name in names if (found := re.match(r"decoder\.up\.(\d+)\.", name))]
    last = max(stages, default=0)
    turned = {
        name: re.sub(r"^(decoder\.up\.)(\d+)", lambda found: f"{found[1]}{last - int(found[2])}", name)
        for name in names
    }
    return {_replaced(turned[name], KL_RENAMES): name for name in names}


def _flux2_config(shapes: Shapes) -> dict[str, Any]:
    config = _kl_config(shapes)
    stages = range(len(config["block_out_channels"]))
    widths = [shapes[f"decoder.up_blocks.{stage}.resnets.0.conv2.weight"][0] for stage in stages]
    return {**config, "decoder_block_out_channels": tuple(reversed(widths))}


def _kl_config(shapes: Shapes) -> dict[str, Any]:
    stages = _count(shapes, r"encoder\.down_blocks\.(\d+)\.")
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "block_out_channels": tuple(
            shapes[f"encoder.down_blocks.{stage}.resnets.0.conv1.weight"][0] for stage in range(stages)
        ),
        "layers_per_block": _count(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "down_block_types": ("DownEncoderBlock2D",) * stages,
        "up_block_types": ("UpDecoderBlock2D",) * stages,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        "mid_block_add_attention": "encoder.mid_block.attentions.0.to_q.weight" in shapes,
    }


def _count(shapes: Shapes, pattern: str) -> int:
    return len({found[1] for name in shapes if (found := re.match(pattern, name))})


def _replaced(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


WAN_FILE = VaeFile(
    title="Wan 2.1 VAE",
    model_class="AutoencoderKLWan",
    signature=(
        "decoder.norm_out.gamma",
        "post_quant_conv.weight",
        "decoder.up_blocks.0.upsamplers.0.time_conv.weight",
    ),
    renamed=_wan_names,
    config_from=_wan_config,
    channels=16,
)
KL_FILE = VaeFile(
    title="VAE of pictures such as ae.safetensors",
    model_class="AutoencoderKL",
    signature=(
        "encoder.conv_in.weight",
        "decoder.conv_in.weight",
        "decoder.conv_out.weight",
        "encoder.down_blocks.0.resnets.0.conv1.weight",
    ),
    renamed=_kl_names,
    config_from=_kl_config,
)
WAN22_FILE = VaeFile(
    title="Wan 2.2 VAE",
    model_class="AutoencoderKLWan",
    signature=(
        "decoder.norm_out.gamma",
        "post_quant_conv.weight",
        "decoder.up_blocks.0.upsampler.time_conv.weight",
    ),
    renamed=_wan22_names,
    config_from=_wan22_config,
    channels=48,
    colours=3 * WAN22_PATCH**2,
)
FLUX2_FILE = VaeFile(
    title="VAE of Flux.2",
    model_class="AutoencoderKLFlux2",
    signature=(*KL_FILE.signature, "bn.running_mean", "bn.running_var"),
    renamed=_kl_names,
    config_from=_flux2_config,
)
FILES: Mapping[str, tuple[VaeFile, ...]] = {
    "AutoencoderKLWan": (WAN_FILE, WAN22_FILE),
    "AutoencoderKLQwenImage": (WAN_FILE,),
    "AutoencoderKL": (KL_FILE,),
    "AutoencoderKLFlux2": (FLUX2_FILE,),
}
"""The layouts by the class that a family names. Qwen-Image's VAE is Wan 2.1's with other weights."""
