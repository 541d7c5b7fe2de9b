"""Small decoders that draw previews: of pictures (TAESD) and of video (TAEHV), both by Ollin Boer Bohan.

ComfyUI reads their files from `models/vae_approx`. The names of the tensors and what is computed with them are those of
github.com/madebyollin/taesd and github.com/madebyollin/taehv.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import Refused
from ..safetensors_header import read_header

VIDEO = "decoder."
"""What the names begin with in a file for video; one for pictures holds a decoder alone, without a prefix."""
VIDEO_OUTPUT = "decoder.22.bias"
PLAIN = (3,)
OUTPUTS = (PLAIN, (12,), (48,))
"""Shapes of that bias: a pixel's colours, or those of patches of 2 x 2 or 4 x 4."""
WIDTHS = (256, 128, 64, 64)
FRAMES = (1, 2, 2)
"""Of the video decoder: its width at each size, and how many frames it makes of one when the size doubles."""


class TinyDecoder:
    """Draws the first picture, or the first frame, of a latent."""

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        self._model, self._device = model.eval().requires_grad_(False).to(device), device

    @classmethod
    def load(cls, path: Path, *, channels: int, device: torch.device) -> TinyDecoder:
        """From a file that decodes latents of so many channels. Raises `Refused` when it is something else."""
        header = read_header(path)
        prefix = VIDEO if VIDEO_OUTPUT in header else ""
        first, outputs = header.get(f"{prefix}1.weight"), header[VIDEO_OUTPUT].shape if prefix else PLAIN
        if first is None or first.shape[1:2] != (channels,) or outputs not in OUTPUTS:
            raise Refused(f"{path.name} is no small decoder of latents with {channels} channels")
        model = _video_decoder(channels, *outputs) if prefix else _picture_decoder(channels)
        try:
            tensors = {name: tensor.float() for name, tensor in load_file(path).items() if name.startswith(prefix)}
            model.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
        except (RuntimeError, SafetensorError) as error:
            raise Refused(f"{path.name} is no small decoder, or is damaged: {str(error)[:300]}") from error
        return cls(model, device=device)

    @torch.inference_mode()
    def __call__(self, denoised: torch.Tensor) -> torch.Tensor:
        """`(B, C, [F,] H, W)` in the model's space -> `(H, W, 3)` uint8 on the CPU."""
        first = denoised[:1, :, 0] if denoised.ndim == 5 else denoised[:1]
        picture = self._model(first.float())[-1].clamp_(0.0, 1.0).mul_(255.0)
        return picture.to("cpu", torch.uint8).movedim(0, -1).contiguous()


class Clamp(nn.Module):
    """Keeps a latent within -3 and 3, softly."""

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.tanh(latent / 3) * 3


class MemoryBlock(nn.Module):
    """A residual block that sees each frame beside the one before it. Frames lie along the batch dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _conv(2 * width, width), nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)
        )

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        before = F.pad(frames, (0, 0, 0, 0, 0, 0, 1, 0))[:-1]
        return F.relu(self.conv(torch.cat([frames, before], dim=1)) + frames)


class Grow(nn.Module):
    """Makes several frames of each."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * times, 1, bias=False)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.conv(frames).reshape(-1, *frames.shape[1:])


def _picture_decoder(channels: int) -> nn.Module:
    """TAESD's: `(1, C, H, W)` -> `(1, 3, 8 H, 8 W)` in 0..1, by the layers of diffusers' class."""
    return nn.Sequential(Clamp(), *AutoencoderTiny(latent_channels=channels).decoder.layers)


def _video_decoder(channels: int, out_channels: int) -> nn.Module:
    """TAEHV's: `(1, C, H, W)` of a first frame -> `(4, 3, 8 H, 8 W)` in 0..1, of which the last is that frame.

    A decoder of 12 channels gives patches of 2 x 2, and a picture twice as large.
    """
    layers: list[nn.Module] = [Clamp(), _conv(channels, WIDTHS[0]), nn.ReLU()]
    for width, following, times in zip(WIDTHS[:-1], WIDTHS[1:], FRAMES, strict=True):
        layers += [MemoryBlock(width) for _ in range(3)]
        layers += [nn.Upsample(scale_factor=2), Grow(width, times), _conv(width, following, bias=False)]
    patch = math.isqrt(out_channels // 3)
    return nn.Sequential(*layers, nn.ReLU(), _conv(WIDTHS[-1], out_channels), nn.PixelShuffle(patch))


def _conv(channels: int, out_channels: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, padding=1, bias=bias)
