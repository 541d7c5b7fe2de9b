"""Latents -> pictures, by the Wan autoencoder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from ..configuration import load_folder
from ..errors import Refused
from ..inspection import read_json
from ..progress import ReportProgress
from ..safetensors_header import read_header

STAGE = "decoding"
STAGE_BLOCKS = 4
"""Entries of one decoder stage in the original list: three residual blocks and an upsampler."""

# The original layout's names -> diffusers', in this order.
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


class VideoDecoder:
    """The decoding half of a Wan autoencoder."""

    def __init__(self, model: AutoencoderKLWan, *, device: torch.device) -> None:
        self._model, self._device = model.eval().requires_grad_(False).to(device), device

    @classmethod
    def load(cls, path: Path, *, device: torch.device) -> VideoDecoder:
        """From a diffusers folder, or a single file in ComfyUI's names. Raises `Refused` when it is something else."""
        return cls(_from_folder(path) if path.is_dir() else _from_file(path), device=device)

    @torch.inference_mode()
    def decode(self, latent: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor:
        """`(B, C, F, H, W)` or `(B, C, H, W)` in the VAE's own space -> `(B * F, H, W, 3)` float32 in 0..1 on the CPU."""
        latent = latent.unsqueeze(2) if latent.ndim == 4 else latent
        with self._reporting(latent.shape[0] * latent.shape[2], progress):
            videos = [self._decode_one(item) for item in latent.float().split(1)]
        return torch.cat(videos)

    def _decode_one(self, latent: torch.Tensor) -> torch.Tensor:
        video = self._model.decode(latent.to(self._device), return_dict=False)[0][0]
        return ((video.movedim(0, -1).cpu().float() + 1.0) / 2.0).clamp_(0.0, 1.0)

    @contextmanager
    def _reporting(self, frames: int, progress: ReportProgress) -> Iterator[None]:
        """Report after each block of the decoder; it runs once for each latent frame of each item."""
        blocks = self._model.decoder.up_blocks
        total, steps = frames * len(blocks), iter(range(1, frames * len(blocks) + 1))
        hooks = [
            block.register_forward_hook(lambda *_: progress(STAGE, next(steps), total, together=False))
            for block in blocks
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _from_folder(path: Path) -> AutoencoderKLWan:
    kind = read_json(path / "config.json").get("_class_name")
    if kind != AutoencoderKLWan.__name__:
        raise Refused(f"{path} holds a VAE of another kind ({kind}): Wan needs an {AutoencoderKLWan.__name__}")
    return load_folder(AutoencoderKLWan, path, build=AutoencoderKLWan.from_config, torch_dtype=torch.float32)


def _from_file(path: Path) -> AutoencoderKLWan:
    names = {_renamed(name): name for name in read_header(path)}
    for needed in _SIGNATURE:
        if needed not in names:
            raise Refused(f"{path} is no Wan 2.1 VAE (it lacks {needed}): use a VAE Loader and VAE Decode instead")
    stored = load_file(path)
    width, channels = (stored[names[name]].shape[0] for name in _SIGNATURE[:2])
    model = AutoencoderKLWan(base_dim=width, z_dim=channels)
    try:
        model.load_state_dict({name: stored[original].float() for name, original in names.items()})
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
