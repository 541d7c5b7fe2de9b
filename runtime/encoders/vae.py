"""Latents -> pictures and pictures -> latents, by the autoencoder of a family, over all ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ..errors import Refused
from ..families.spec import LatentFormat
from ..progress import ReportProgress
from .packed_latents import packed, unpacked
from .reporting import reporting
from .rows import Rows, split_rows

DECODING, ENCODING = "decoding", "encoding"
COLOURS = 3


class Autoencoder:
    """A VAE of which each rank works on some rows of the picture. All ranks make the same calls with the same values.

    Latents are in the VAE's own space, as ComfyUI's are between nodes.
    """

    def __init__(self, model: nn.Module, *, form: LatentFormat, rows: Rows, device: torch.device) -> None:
        self.model = model.eval().requires_grad_(False).to(device)
        self._form, self._rows, self._device = form, rows, device
        if rows.group is not None:
            split_rows(model, rows)

    @torch.inference_mode()
    def decode(self, latent: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor | None:
        """`(B, C, H, W)` or `(B, C, F, H, W)` -> `(B * F, H, W, 3)` float32 in 0..1 on the CPU; None but on the first rank.

        Raises `Refused` for a latent of another VAE.
        """
        latent = self._checked_latent(latent)
        self._rows.share(latent.shape[-2])
        frames = latent.shape[2] if self._is_video else 1
        blocks, runs = self.model.decoder.up_blocks, len(latent) * frames
        with reporting(blocks, partial(progress, DECODING), runs=runs):
            items = [self._decode_one(item) for item in latent.float().split(1)]
        return None if items[0] is None else torch.cat(items)

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor | None:
        """`(N, H, W, 3)` in 0..1 -> the latent's mean, float32 on the CPU; None but on the first rank.

        As ComfyUI's VAE Encode: the middle of the picture where a side is no multiple of what the VAE scales down by; for
        a VAE of videos the pictures are the frames of one, and those after the last whole group of frames are left out.
        Raises `Refused` for what is no picture.
        """
        pixels = self._cropped(pixels)
        self._rows.share(pixels.shape[1] // self._form.spatial)
        items = pixels.movedim(-1, 1)
        items = [items.transpose(0, 1).unsqueeze(0)] if self._is_video else items.split(1)
        runs = 1 + (len(pixels) - 1) // self._form.temporal if self._is_video else len(pixels)
        with reporting(self.model.encoder.down_blocks, partial(progress, ENCODING), runs=runs):
            latents = [self._encode_one(item) for item in items]
        return None if latents[0] is None else torch.cat(latents)

    @property
    def _is_video(self) -> bool:
        return self._form.dims == 3

    def _decode_one(self, latent: torch.Tensor) -> torch.Tensor | None:
        local = unpacked(self._rows.take(latent).to(self._device), self.model)
        pictures = self.model.decode(local, return_dict=False)[0][0].movedim(0, -1).float()
        pictures = pictures if self._is_video else pictures.unsqueeze(0)
        pictures = self._rows.gather_on_first(((pictures + 1.0) / 2.0).clamp_(0.0, 1.0), dim=1)
        return None if pictures is None else pictures.cpu()

    def _encode_one(self, pictures: torch.Tensor) -> torch.Tensor | None:
        local = self._rows.take(pictures).to(self._device).float() * 2.0 - 1.0
        latent = packed(self.model.encode(local, return_dict=False)[0].mode().float(), self.model)
        latent = self._rows.gather_on_first(latent, dim=latent.ndim - 2)
        return None if latent is None else latent.cpu()

    def _checked_latent(self, latent: torch.Tensor) -> torch.Tensor:
        if latent.ndim not in (4, 5) or latent.shape[1] != self._form.channels:
            raise Refused(
                f"the latent has shape {tuple(latent.shape)}, but this VAE decodes {self._form.channels} channels"
            )
        if not latent.numel():
            raise Refused(f"the latent has shape {tuple(latent.shape)}: there is nothing in it")
        _check_finite(latent, "the latent")
        if self._is_video:
            return latent.unsqueeze(2) if latent.ndim == 4 else latent
        return latent.transpose(1, 2).flatten(0, 1) if latent.ndim == 5 else latent

    def _cropped(self, pixels: torch.Tensor) -> torch.Tensor:
        shape, unit = tuple(pixels.shape), self._form.spatial
        if pixels.ndim != 4 or shape[-1] < COLOURS or not len(pixels):
            raise Refused(f"the pictures have shape {shape}, but (pictures, height, width, {COLOURS}) is needed")
        _check_finite(pixels, "the picture")
        if min(shape[1:3]) < unit:
            raise Refused(
                f"pictures of {shape[2]} x {shape[1]} are too small for this VAE: {unit} x {unit} is the least"
            )
        for dim in (1, 2):
            rest = shape[dim] % unit
            pixels = pixels.narrow(dim, rest // 2, shape[dim] - rest)
        return pixels[..., :COLOURS]


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not tensor.isfinite().all():
        raise Refused(f"{what} has numbers that are not finite (nan or inf): look at the node that it comes from")
