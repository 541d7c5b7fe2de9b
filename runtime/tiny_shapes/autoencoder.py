"""The autoencoder: a narrow `AutoencoderKLWan`, trained so that its latents have the statistics Wan's users expect.

Hosts of Wan latents subtract a fixed mean and divide by a fixed deviation for each channel, and draw previews with a
fixed linear map. Training keeps each channel near mean 0 and deviation 1 and fits that map; `fold_statistics` then
moves the fixed figures into the 1x1x1 convolutions on either side of the latent, exactly.
"""

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch import Tensor, nn

from .scenes import FRAMES, SIZE, draw, draw_clip, random_scene

CONFIG = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
}

# The linear map from a normalised Wan 2.1 latent to RGB from -1 to 1 that hosts use for previews.
PREVIEW_FACTORS = (
    (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.1420),
    (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
    (-0.0412, 0.0267, -0.1364), (-0.1293, 0.0740, 0.1636), (0.0680, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
    (-0.1251, 0.0927, 0.1699), (0.0060, -0.0633, 0.0005), (0.3477, 0.2275, 0.2950), (0.1984, 0.0913, 0.1861),
)  # fmt: skip
PREVIEW_BIAS = (-0.1835, -0.0868, -0.3360)

LATENT_NOISE = 0.15
"""Noise on the latent in training, and the deviation the encoder states afterwards (both in normalised units)."""
PREVIEW_WEIGHT = 0.2
MOMENT_WEIGHT = 0.1

Progress = Callable[[str], None]


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


def picture_batch(random: np.random.Generator, count: int, size: int) -> Tensor:
    """Drawn scenes, (count, 3, 1, size, size) from -1 to 1; half of the small ones are cut from native renders."""

    def one() -> np.ndarray:
        scene, moment = random_scene(random, moving=random.random() < 0.3), random.random()
        if size == SIZE or random.random() < 0.4:
            return draw(scene, size, moment)
        top, left = random.integers(SIZE - size + 1, size=2)
        return draw(scene, SIZE, moment)[top : top + size, left : left + size]

    return to_tensor(np.stack([one() for _ in range(count)])[:, None])


def clip_batch(random: np.random.Generator, count: int, size: int) -> Tensor:
    """Drawn clips, (count, 3, FRAMES, size, size) from -1 to 1; one in four stands still."""
    scenes = [random_scene(random, moving=random.random() < 0.75) for _ in range(count)]
    return to_tensor(np.stack([draw_clip(scene, FRAMES, size) for scene in scenes]))


def to_tensor(frames: np.ndarray) -> Tensor:
    """(B, T, H, W, 3) from 0 to 1 -> (B, 3, T, H, W) from -1 to 1."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 4, 1, 2, 3))) * 2 - 1


def preview(latent: Tensor) -> Tensor:
    """Normalised latent (B, 16, T, h, w) -> RGB from -1 to 1, (B, 3, T, h, w)."""
    factors = torch.tensor(PREVIEW_FACTORS)
    return torch.einsum("bcthw,cr->brthw", latent, factors) + torch.tensor(PREVIEW_BIAS).view(1, 3, 1, 1, 1)


def _preview_target(pixels: Tensor, frames: int) -> Tensor:
    """The picture eight times smaller; of each group of frames that shares a latent frame, the mean."""
    small = F.avg_pool3d(pixels, (1, 8, 8))
    if frames == 1:
        return small
    later = small[:, :, 1:].unflatten(2, (frames - 1, -1)).mean(dim=3)
    return torch.cat([small[:, :, :1], later], dim=2)


def _loss(pixels: Tensor, latent: Tensor, decoded: Tensor) -> Tensor:
    difference = decoded - pixels
    moments = latent.mean(dim=(0, 2, 3, 4)).square() + latent.var(dim=(0, 2, 3, 4)).add(1e-4).log().square() / 4
    preview_error = F.mse_loss(preview(latent), _preview_target(pixels, latent.shape[2]))
    return (
        difference.abs().mean()
        + 2 * difference.square().mean()
        + PREVIEW_WEIGHT * preview_error
        + MOMENT_WEIGHT * moments.mean()
    )


def _training_step(autoencoder: AutoencoderKLWan, view: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    still = pixels.shape[2] == 1
    latent = encode_pictures(view, pixels) if still else encode_clips(autoencoder, pixels)
    noise = torch.rand(len(latent), 1, 1, 1, 1) * 2 * LATENT_NOISE
    noisy = latent + noise * torch.randn_like(latent)
    decoded = decode_pictures(view, noisy) if still else decode_clips(autoencoder, noisy)
    return _loss(pixels, latent, decoded)


def _draw_batch(random: np.random.Generator, step: int, progress: float) -> Tensor:
    """Pictures first; later some clips and some native-size pictures."""
    if progress > 0.55 and step % 2:
        return clip_batch(random, 4, 48 if step % 4 == 1 else 64)
    if progress > 0.55 and step % 8 == 0:
        return picture_batch(random, 6, SIZE)
    return picture_batch(random, 16, 64)


def train_autoencoder(checkpoint: Path, minutes: float, report: Progress = print) -> AutoencoderKLWan:
    """Train for `minutes`, saving the weights to `checkpoint` (a torch state dict) every minute."""
    random, autoencoder = np.random.default_rng(1), build_autoencoder()
    view = picture_view(autoencoder)
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=1e-4)
    start, saved, step = time.monotonic(), 0.0, 0
    while (elapsed := time.monotonic() - start) < minutes * 60:
        progress = elapsed / (minutes * 60)
        rate = 3e-3 * min(1, (step + 1) / 50) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _training_step(autoencoder, view, _draw_batch(random, step, progress))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            report(f"autoencoder {elapsed:6.0f} s  step {step}  loss {loss.item():.4f}")
        if elapsed - saved > 60:
            torch.save(autoencoder.state_dict(), checkpoint)
            saved = elapsed
        step += 1
    fold_statistics(autoencoder, *measure_statistics(autoencoder))
    torch.save(autoencoder.state_dict(), checkpoint)
    return autoencoder


@torch.no_grad()
def measure_statistics(autoencoder: AutoencoderKLWan, pictures: int = 300, clips: int = 12) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each raw latent channel over native-size pictures and some clips."""
    random, view = np.random.default_rng(2), picture_view(autoencoder)
    still = [encode_pictures(view, picture_batch(random, 20, SIZE)) for _ in range(pictures // 20)]
    moving = [encode_clips(autoencoder, clip_batch(random, 2, SIZE)) for _ in range(clips // 2)]
    values = torch.cat([latent.transpose(0, 1).flatten(1) for latent in still + moving], dim=1)
    return values.mean(dim=1), values.std(dim=1)


@torch.no_grad()
def fold_statistics(autoencoder: AutoencoderKLWan, mean: Tensor, deviation: Tensor) -> None:
    """Move latents from (mean, deviation) to the figures in the config; what the decoder sees stays the same.

    The encoder's log variance becomes constant: it states the noise that the decoder was trained with.
    """
    target_mean = torch.tensor(autoencoder.config.latents_mean)
    target_deviation = torch.tensor(autoencoder.config.latents_std)
    scale = target_deviation / deviation
    quant, post_quant = autoencoder.quant_conv, autoencoder.post_quant_conv
    channels = len(mean)
    post_quant.bias += post_quant.weight[:, :, 0, 0, 0] @ (mean - target_mean / scale)
    post_quant.weight /= scale.view(1, -1, 1, 1, 1)
    quant.weight[:channels] *= scale.view(-1, 1, 1, 1, 1)
    quant.bias[:channels] = (quant.bias[:channels] - mean) * scale + target_mean
    quant.weight[channels:] = 0
    quant.bias[channels:] = 2 * torch.log(LATENT_NOISE * target_deviation)
