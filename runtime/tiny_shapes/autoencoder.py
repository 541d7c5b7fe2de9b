"""The autoencoder: a narrow `AutoencoderKLWan`, trained so that its latents have the statistics Wan's users expect.

Hosts of Wan latents subtract a fixed mean and divide by a fixed deviation for each channel, and draw previews with a
fixed linear map. Training keeps each channel near mean 0 and deviation 1 and fits that map; `fold_statistics` then
moves the fixed figures into the 1x1x1 convolutions on either side of the latent, exactly.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch import Tensor, nn

CONFIG = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
}

LATENT_NOISE = 0.15
"""Noise on the latent in training, and the deviation the encoder states afterwards (both in normalised units)."""


def build_autoencoder() -> AutoencoderKLWan:
    """A fresh autoencoder that treats each frame alone: training starts from pictures and adds time later."""
    autoencoder = AutoencoderKLWan(**CONFIG)
    with torch.no_grad():
        for module in autoencoder.modules():
            if isinstance(module, WanCausalConv3d) and module.weight.shape[2] == 3:
                module.weight[:, :, :2] = 0
            if isinstance(module, WanResample) and hasattr(module, "time_conv"):
                _copy_latest_frame(module.time_conv)
    return autoencoder


def _copy_latest_frame(conv: WanCausalConv3d) -> None:
    """Let a temporal resampling start as the identity on its latest frame."""
    outputs, inputs = conv.weight.shape[:2]
    conv.weight.zero_()
    conv.bias.zero_()
    conv.weight[:, :, 2, 0, 0] = torch.eye(inputs).repeat(outputs // inputs, 1)


class PictureConv(nn.Module):
    """A causal convolution over one frame: only the last temporal slice of its kernel meets data."""

    def __init__(self, conv: WanCausalConv3d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight[:, :, -1]
        return F.conv2d(x[:, :, 0], weight, self.conv.bias, padding=weight.shape[-1] // 2)[:, :, None]


def picture_view(autoencoder: AutoencoderKLWan) -> AutoencoderKLWan:
    """The same parameters as a model of single frames, several times faster."""
    view = copy.deepcopy(autoencoder, {id(parameter): parameter for parameter in autoencoder.parameters()})
    for parent in list(view.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, WanCausalConv3d):
                setattr(parent, name, PictureConv(child))
    return view


def encode_pictures(view: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """(B, 3, 1, H, W) from -1 to 1 -> raw latent means (B, 16, 1, H/8, W/8)."""
    return view.quant_conv(view.encoder(pixels)).chunk(2, dim=1)[0]


def decode_pictures(view: AutoencoderKLWan, latent: Tensor) -> Tensor:
    """The inverse of `encode_pictures`, not clamped."""
    return view.decoder(view.post_quant_conv(latent))


def encode_clips(autoencoder: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """(B, 3, 1 + 4n, H, W) -> raw latent means (B, 16, 1 + n, H/8, W/8)."""
    return autoencoder.encode(pixels).latent_dist.mode()


def decode_clips(autoencoder: AutoencoderKLWan, latent: Tensor) -> Tensor:
    """The inverse of `encode_clips`."""
    return autoencoder.decode(latent).sample


def to_tensor(frames: np.ndarray) -> Tensor:
    """(B, T, H, W, 3) from 0 to 1 -> (B, 3, T, H, W) from -1 to 1."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 4, 1, 2, 3))) * 2 - 1


def stated_statistics(autoencoder: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each latent channel as the config states them, both (1, 16, 1, 1, 1)."""
    config = autoencoder.config
    mean, deviation = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    return mean.view(1, -1, 1, 1, 1), deviation.view(1, -1, 1, 1, 1)


def normalise(autoencoder: AutoencoderKLWan, latent: Tensor) -> Tensor:
    """Raw latents of the autoencoder -> what the transformer sees."""
    mean, deviation = stated_statistics(autoencoder)
    return (latent - mean) / deviation


def denormalise(autoencoder: AutoencoderKLWan, latent: Tensor) -> Tensor:
    """What the transformer makes -> raw latents for the autoencoder."""
    mean, deviation = stated_statistics(autoencoder)
    return latent * deviation + mean


@torch.no_grad()
def fold_statistics(autoencoder: AutoencoderKLWan, mean: Tensor, deviation: Tensor) -> None:
    """Move latents from (mean, deviation) to the figures in the config; what the decoder sees stays the same.

    The encoder's log variance becomes constant: it states the noise that the decoder was trained with.
    """
    target_mean, target_deviation = (figure.flatten() for figure in stated_statistics(autoencoder))
    scale = target_deviation / deviation
    quant, post_quant = autoencoder.quant_conv, autoencoder.post_quant_conv
    channels = len(mean)
    post_quant.bias += post_quant.weight[:, :, 0, 0, 0] @ (mean - target_mean / scale)
    post_quant.weight /= scale.view(1, -1, 1, 1, 1)
    quant.weight[:channels] *= scale.view(-1, 1, 1, 1, 1)
    quant.bias[:channels] = (quant.bias[:channels] - mean) * scale + target_mean
    quant.weight[channels:] = 0
    quant.bias[channels:] = 2 * torch.log(LATENT_NOISE * target_deviation)
