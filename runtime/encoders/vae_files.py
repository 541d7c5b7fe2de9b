"""Autoencoders from their files: a diffusers folder, or a single file in ComfyUI's names."""

from __future__ import annotations

import re
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file
from torch import nn

from ..configuration import building, load_folder
from ..errors import Refused
from ..families.spec import FamilySpec
from ..inspection import read_json
from ..safetensors_header import read_header

STAGE_BLOCKS = 4
"""Entries of one decoder stage in the original list: three residual blocks and an upsampler."""

_ONE_FILE = ("AutoencoderKLWan", "AutoencoderKLQwenImage")
"""The classes whose single files are Wan's: Qwen-Image's VAE is Wan 2.1's with other weights."""

_SIGNATURE = (
    "decoder.norm_out.gamma",
    "post_quant_conv.weight",
    "decoder.up_blocks.0.upsamplers.0.time_conv.weight",
)
"""Tensors of every Wan 2.1 VAE, by diffusers' names; the first two say its width and channels."""
_RENAMES = (
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
"""The original layout's names -> diffusers', in this order."""


def load_autoencoder(path: Path, family: FamilySpec) -> nn.Module:
    """The VAE of a family, in float32 on the CPU. Raises `Refused` when the path holds something else."""
    if not family.vae_class:
        raise Refused(f"the VAE of {family.title} is not available yet: use a VAE Loader with VAE Decode or VAE Encode")
    if path.is_dir():
        return _from_folder(path, family)
    if family.vae_class not in _ONE_FILE:
        raise Refused(
            f"{path} is a single file, and for {family.title} a diffusers folder is needed: choose one, or use a VAE Loader "
            f"and VAE Decode"
        )
    return _from_file(path)


def _from_folder(path: Path, family: FamilySpec) -> nn.Module:
    kind = read_json(path / "config.json").get("_class_name")
    if kind != family.vae_class:
        raise Refused(f"{path} holds a VAE of another kind ({kind}): {family.title} needs an {family.vae_class}")
    model_class = getattr(diffusers, kind)
    return load_folder(model_class, path, build=model_class.from_config, torch_dtype=torch.float32)


def _from_file(path: Path) -> AutoencoderKLWan:
    header = read_header(path)
    names = {_renamed(name): name for name in header}
    for needed in _SIGNATURE:
        if needed not in names:
            raise Refused(f"{path} is no Wan 2.1 VAE (it lacks {needed}): use a VAE Loader and VAE Decode instead")
    with building(AutoencoderKLWan, where=path):
        width, channels = (header[names[name]].shape[0] for name in _SIGNATURE[:2])
        model = AutoencoderKLWan(base_dim=width, z_dim=channels)
    stored = load_file(path)
    try:
        model.load_state_dict({name: stored[original].float() for name, original in names.items()}, assign=True)
    except RuntimeError as error:
        raise Refused(f"{path} is no Wan 2.1 VAE, or is damaged: {str(error)[:300]}") from error
    return model


def _renamed(name: str) -> str:
    found = re.match(r"decoder\.upsamples\.(\d+)\.(.*)", name)
    if found:
        stage, place = divmod(int(found[1]), STAGE_BLOCKS)
        kind = "upsamplers.0" if place == STAGE_BLOCKS - 1 else f"resnets.{place}"
        name = f"decoder.up_blocks.{stage}.{kind}.{found[2]}"
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name
