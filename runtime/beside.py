"""What stands beside a noisy latent, channel by channel: pictures and masks in its size, with the numbers of ComfyUI."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .errors import Refused

FRAMES_OF_ONE = 4
"""Frames of a video that one of a latent stands for."""


def mask_of_pixels(mask: torch.Tensor | None, x: torch.Tensor, scale: int) -> torch.Tensor:
    """A mask as channels of the latent, `(B, scale * scale, H, W)`: the pixels under each of its places, row by row."""
    if mask is None:
        mask = torch.ones_like(x)[:, :1]
    mask = mask.to(x)
    mask = mask.reshape(-1, *(mask.shape[-3:] if mask.ndim > 3 else (1, *mask.shape[-2:]))).mean(1, keepdim=True)
    pixels = fit_picture(mask, (*x.shape[:2], x.shape[2] * scale, x.shape[3] * scale))
    return pixels.unflatten(3, (-1, scale)).unflatten(2, (-1, scale)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def given_frames(mask: torch.Tensor | None, x: torch.Tensor, *, of_one: int = FRAMES_OF_ONE) -> torch.Tensor:
    """Which frames are given, as channels of a latent of videos, `(B, of_one, F, H, W)`: what a mask, `(B, C, F, H, W)`, leaves
    as it is. It has a channel for each frame that one of the latent stands for, or one for all of them. Where it ends,
    no frame is given.
    """
    if mask is None:
        return torch.zeros_like(x)[:, :of_one]
    if mask.ndim != x.ndim or mask.shape[2] > x.shape[2]:
        raise Refused(
            f"the concat_mask of a conditioning has shape {tuple(mask.shape)}, but the latent is {tuple(x.shape)}: set the "
            f"same length in the node that made it"
        )
    mask = mask.to(x)
    if mask.shape[1] != of_one:
        mask = mask.mean(1, keepdim=True)
    given = fit_picture(1.0 - mask, x.shape)
    given = F.pad(given, (0, 0, 0, 0, 0, x.shape[2] - given.shape[2]))
    return given.expand(-1, of_one, -1, -1, -1)


def fit_picture(picture: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A batch of pictures or videos in the batch, height and width of `shape`: the middle of each, scaled."""
    height, width = shape[-2:]
    if picture.shape[-2:] != (height, width):
        frames = picture.movedim(1, -3).flatten(0, -4)
        frames = F.interpolate(_middle(frames, width / height), size=(height, width), mode="bilinear")
        picture = frames.unflatten(0, (len(picture), *picture.shape[2:-2])).movedim(-3, 1)
    if len(picture) == shape[0] or shape[0] == 1:
        return picture[: shape[0]]
    return picture[[_item(number, len(picture), shape[0]) for number in range(shape[0])]]


def _middle(picture: torch.Tensor, aspect: float) -> torch.Tensor:
    """The largest part around the middle that has this width over height."""
    height, width = picture.shape[-2:]
    left = round((width - width * (aspect / (width / height))) / 2) if width / height > aspect else 0
    top = round((height - height * (width / height / aspect)) / 2) if width / height < aspect else 0
    return picture[..., top : height - top, left : width - left]


def _item(number: int, there: int, wanted: int) -> int:
    """Which of the pictures that are there item `number` of a batch gets."""
    if wanted < there:
        return min(round(number * (there - 1) / (wanted - 1)), there - 1)
    return min(math.floor((number + 0.5) * there / wanted), there - 1)
