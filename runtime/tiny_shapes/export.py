"""The model as the single files that ComfyUI loads: the key names of the original Wan 2.1 release."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import MODEL_FOLDER

WEIGHTS = "diffusion_pytorch_model.safetensors"

# Applied in this order, each as a plain replacement. norm2 and norm3 trade places.
_TRANSFORMER_RENAMES = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    (".norm2.", ".norm_."),
    (".norm3.", ".norm2."),
    (".norm_.", ".norm3."),
    ("scale_shift_table", "modulation"),
    ("proj_out", "head.head"),
)
_VAE_RENAMES = (
    ("post_quant_conv.", "conv2."),
    ("quant_conv.", "conv1."),
    ("coder.conv_in.", "coder.conv1."),
    ("coder.norm_out.", "coder.head.0."),
    ("coder.conv_out.", "coder.head.2."),
    (".mid_block.resnets.0.", ".middle.0."),
    (".mid_block.attentions.0.", ".middle.1."),
    (".mid_block.resnets.1.", ".middle.2."),
    (".down_blocks.", ".downsamples."),
    (".norm1.", ".residual.0."),
    (".norm2.", ".residual.3."),
    (".conv_shortcut.", ".shortcut."),
)
_STAGE_BLOCKS = 4
"""Entries of one decoder stage in the original list: three residual blocks and an upsampler."""


def to_comfy_transformer(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a `WanTransformer3DModel` under the original names."""
    return {_transformer_key(key): value for key, value in state_dict.items()}


def _transformer_key(key: str) -> str:
    key = _rename(key, _TRANSFORMER_RENAMES)
    return "head.modulation" if key == "modulation" else key


def to_comfy_vae(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an `AutoencoderKLWan` (Wan 2.1 layout) under the original names."""
    return {_vae_key(key): value for key, value in state_dict.items()}


def _vae_key(key: str) -> str:
    parts = key.split(".")
    if key.startswith("decoder.up_blocks."):
        within = int(parts[4]) if parts[3] == "resnets" else _STAGE_BLOCKS - 1
        parts = ["decoder", "upsamples", str(int(parts[2]) * _STAGE_BLOCKS + within), *parts[5:]]
    if len(parts) > 3:  # inside a block; conv1 and conv2 also name outer layers
        parts = [{"conv1": "residual.2", "conv2": "residual.6"}.get(part, part) for part in parts]
    return _rename(".".join(parts), _VAE_RENAMES)


def _rename(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        key = key.replace(old, new)
    return key


def export_comfy_transformer(path: Path, dtype: torch.dtype = torch.float32, folder: Path = MODEL_FOLDER) -> None:
    """Write the transformer of a diffusers folder for ComfyUI's models/diffusion_models."""
    _export(to_comfy_transformer(load_file(folder / "transformer" / WEIGHTS)), path, dtype)


def export_comfy_vae(path: Path, dtype: torch.dtype = torch.float32, folder: Path = MODEL_FOLDER) -> None:
    """Write the autoencoder of a diffusers folder for ComfyUI's models/vae."""
    _export(to_comfy_vae(load_file(folder / "vae" / WEIGHTS)), path, dtype)


def _export(state_dict: Mapping[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    save_file({key: value.to(dtype).contiguous() for key, value in state_dict.items()}, path)
