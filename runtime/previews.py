"""A picture of the latent in each step: a rough one of its channels, or one by a small decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from .encoders.tiny import TinyDecoder
from .errors import Refused
from .families.spec import LatentFormat
from .protocol import PreviewKind

Draw = Callable[[torch.Tensor], torch.Tensor]
"""A denoised latent `(B, C, [F,] H, W)` in model space -> `(H, W, 3)` uint8 on the CPU, of the first item and frame."""


def previewer(
    kind: PreviewKind, latent: LatentFormat, *, decoders: Sequence[str], device: torch.device
) -> tuple[Draw | None, str]:
    """What draws the previews, and what to tell the user where it is not what they asked for.

    `decoders` are the files of `models/vae_approx`; the family's is found among them by its name, as in ComfyUI.
    """
    rough = partial(preview_image, latent=latent)
    if kind != "taesd":
        return (None if kind == "none" else rough), ""
    try:
        path = _decoder_file(latent.preview_decoder, decoders)
        return TinyDecoder.load(path, channels=latent.channels, device=device), ""
    except (Refused, OSError) as error:
        return rough, f"previews are drawn from the latent's channels (latent2rgb): {error}"


def preview_image(denoised: torch.Tensor, latent: LatentFormat) -> torch.Tensor:
    """`(H, W, 3)` uint8 of the first item (and frame) of a latent in model space, by a linear map of its channels."""
    first = denoised[0, :, 0] if denoised.ndim == 5 else denoised[0]
    if latent.shuffle > 1:
        first = F.pixel_shuffle(first, latent.shuffle)
    factors = torch.tensor(latent.rgb, dtype=first.dtype, device=first.device)
    bias = torch.tensor(latent.rgb_bias, dtype=first.dtype, device=first.device)
    picture = torch.addmm(bias.unsqueeze(1), factors.T, first.flatten(1))
    picture = picture.add_(1.0).mul_(127.5).clamp_(0, 255).to("cpu", torch.uint8)
    return picture.unflatten(1, first.shape[1:]).movedim(0, -1).contiguous()


def _decoder_file(name: str, decoders: Sequence[str]) -> Path:
    """The first file of a name that can be read. Raises `Refused` when there is none."""
    if not name:
        raise Refused("there is no small decoder for this model")
    found = [path for path in map(Path, decoders) if path.name.startswith(name)]
    for path in found:
        if path.suffix.lower() in (".safetensors", ".sft"):
            return path
    if found:
        raise Refused(f"convert {found[0].name} to .safetensors, the only format of a file that Outrigger reads")
    raise Refused(f"put {name}.safetensors into models/vae_approx")
