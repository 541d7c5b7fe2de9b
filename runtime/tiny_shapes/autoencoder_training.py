"""Training of the autoencoder: pictures first, then clips, with statistics and previews kept in shape on the way."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor

from .autoencoder import (
    LATENT_NOISE,
    build_autoencoder,
    decode_clips,
    decode_pictures,
    encode_clips,
    encode_pictures,
    fold_statistics,
    picture_view,
    stated_statistics,
    to_tensor,
)
from .scenes import FRAMES, SIZE, draw, draw_clip, random_scene

# The linear map from a normalised Wan 2.1 latent to RGB from -1 to 1 that hosts use for previews.
PREVIEW_FACTORS = (
    (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.1420),
    (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
    (-0.0412, 0.0267, -0.1364), (-0.1293, 0.0740, 0.1636), (0.0680, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
    (-0.1251, 0.0927, 0.1699), (0.0060, -0.0633, 0.0005), (0.3477, 0.2275, 0.2950), (0.1984, 0.0913, 0.1861),
)  # fmt: skip
PREVIEW_BIAS = (-0.1835, -0.0868, -0.3360)

PREVIEW_WEIGHT = 0.2
MOMENT_WEIGHT = 0.1
LEARNING_RATE = 3e-3
UNIT = (torch.zeros(1), torch.ones(1))
"""Statistics of latents that are normalised as they are: before `fold_statistics`."""

Progress = Callable[[str], None]


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
    """Drawn clips, (count, 3, FRAMES, size, size) from -1 to 1; one in four stands still.

    Three in four of the small ones are cut from native renders, where motion has its native speed.
    """

    def one() -> np.ndarray:
        scene = random_scene(random, moving=random.random() < 0.75)
        if size == SIZE or random.random() < 0.25:
            return draw_clip(scene, FRAMES, size)
        top, left = random.integers(SIZE - size + 1, size=2)
        return draw_clip(scene)[:, top : top + size, left : left + size]

    return to_tensor(np.stack([one() for _ in range(count)]))


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


def _training_step(
    autoencoder: AutoencoderKLWan, view: AutoencoderKLWan, pixels: Tensor, statistics: tuple[Tensor, Tensor]
) -> Tensor:
    mean, deviation = statistics
    still = pixels.shape[2] == 1
    latent = encode_pictures(view, pixels) if still else encode_clips(autoencoder, pixels)
    latent = (latent - mean) / deviation
    noise = torch.rand(len(latent), 1, 1, 1, 1) * 2 * LATENT_NOISE
    noisy = (latent + noise * torch.randn_like(latent)) * deviation + mean
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
    """Train for `minutes` on pictures, then also on clips, and fold the statistics in."""
    random, autoencoder = np.random.default_rng(1), build_autoencoder()
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=1e-4)
    _train(autoencoder, optimizer, partial(_draw_batch, random), UNIT, checkpoint, minutes, report)
    fold_statistics(autoencoder, *measure_statistics(autoencoder))
    torch.save(autoencoder.state_dict(), checkpoint)
    return autoencoder


def refine_time(autoencoder: AutoencoderKLWan, checkpoint: Path, minutes: float, report: Progress = print) -> None:
    """Train on for `minutes`, mostly on clips, with what makes the latent of a single picture held fixed.

    The transformer can learn from pictures at the same time: their latents stay valid.
    """
    hold_picture_latents(autoencoder)
    _refine(autoencoder, checkpoint, minutes, report)


def refine_decoder(autoencoder: AutoencoderKLWan, checkpoint: Path, minutes: float, report: Progress = print) -> None:
    """Train the decoder on for `minutes`, mostly on clips. No latent changes."""
    autoencoder.requires_grad_(False)
    for module in (autoencoder.decoder, autoencoder.post_quant_conv):
        module.requires_grad_(True)
    _refine(autoencoder, checkpoint, minutes, report)


def _refine(autoencoder: AutoencoderKLWan, checkpoint: Path, minutes: float, report: Progress) -> None:
    random = np.random.default_rng(6)
    parameters = [parameter for parameter in autoencoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE / 2, betas=(0.9, 0.98))

    def draw_batch(step: int, progress: float) -> Tensor:
        return picture_batch(random, 8, 64) if step % 5 == 0 else clip_batch(random, 2, 80)

    _train(autoencoder, optimizer, draw_batch, stated_statistics(autoencoder), checkpoint, minutes, report)


def hold_picture_latents(autoencoder: AutoencoderKLWan) -> None:
    """Let only those weights of the encoder learn that look at earlier frames."""
    for module in (autoencoder.encoder, autoencoder.quant_conv):
        module.requires_grad_(False)
    for module in autoencoder.encoder.modules():
        if isinstance(module, WanCausalConv3d) and module.weight.shape[2] == 3:
            module.weight.requires_grad_(True)
            if module.weight.shape[3] == 3:  # not a temporal resampling, which single pictures bypass
                module.weight.register_hook(_without_latest_frame)


def _without_latest_frame(gradient: Tensor) -> Tensor:
    return torch.cat([gradient[:, :, :-1], torch.zeros_like(gradient[:, :, -1:])], dim=2)


def _train(
    autoencoder: AutoencoderKLWan,
    optimizer: torch.optim.Optimizer,
    draw_batch: Callable[[int, float], Tensor],
    statistics: tuple[Tensor, Tensor],
    checkpoint: Path,
    minutes: float,
    report: Progress,
) -> None:
    """The loop: a cosine of the rate over time; the weights go to `checkpoint` every minute and at the end."""
    view, peak = picture_view(autoencoder), optimizer.param_groups[0]["lr"]
    start, saved, step = time.monotonic(), 0.0, 0
    while (elapsed := time.monotonic() - start) < minutes * 60:
        progress = elapsed / (minutes * 60)
        rate = peak * min(1, (step + 1) / 50) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress)))
        optimizer.param_groups[0]["lr"] = rate
        loss = _training_step(autoencoder, view, draw_batch(step, progress), statistics)
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
    torch.save(autoencoder.state_dict(), checkpoint)


@torch.no_grad()
def measure_statistics(autoencoder: AutoencoderKLWan, pictures: int = 300, clips: int = 12) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each raw latent channel over native-size pictures and some clips."""
    random, view = np.random.default_rng(2), picture_view(autoencoder)
    still = [encode_pictures(view, picture_batch(random, 20, SIZE)) for _ in range(pictures // 20)]
    moving = [encode_clips(autoencoder, clip_batch(random, 2, SIZE)) for _ in range(clips // 2)]
    values = torch.cat([latent.transpose(0, 1).flatten(1) for latent in still + moving], dim=1)
    return values.mean(dim=1), values.std(dim=1)
