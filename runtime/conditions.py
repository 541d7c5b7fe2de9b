"""What a model reads of a conditioning, as it takes it; what it cannot take is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .errors import Refused
from .families.spec import FamilySpec
from .protocol import Conditioning
from .sampling.latents import into_model_space


class ConditioningReader:
    """Conditionings as one model reads them: on its device and in its dtype, latents in its own space."""

    def __init__(
        self, family: FamilySpec, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._family, self._place = family, {"dtype": dtype, "device": device}
        self._text_width: int = config[family.text_width]
        self._pooled_width: int = config[family.pooled_width] if family.pooled_width else 0
        self._sources = set(dict(family.inputs).values())

    def read(self, conditioning: Conditioning, x: torch.Tensor, noise_mask: torch.Tensor | None) -> Conditioning:
        """The conditioning for latents like `x`. Raises `Refused` for one of another model."""
        embedding = conditioning.embedding
        if embedding.ndim != 3 or embedding.shape[-1] != self._text_width:
            raise Refused(
                f"the conditioning has shape {tuple(embedding.shape)}, but {self._family.title} takes "
                f"(batch, tokens, {self._text_width}): encode the prompt with the text encoder of this model"
            )
        for field, way_out in self._family.refuses:
            if getattr(conditioning, field):
                raise Refused(f"the conditioning carries {field} {getattr(conditioning, field)}: {way_out}")
        fill = max(self._family.text_fill - embedding.shape[1], 0)
        read = {
            "embedding": F.pad(embedding.to(**self._place), (0, 0, fill, 0)),
            "pooled": self._pooled(conditioning),
            "attention_mask": self._mask(conditioning.attention_mask),
            "guidance": conditioning.guidance if "guidance" in self._sources else None,
            "references": self._references(conditioning),
            "reference_method": self._method(conditioning),
            "concat_latent": self._beside(conditioning, x, noise_mask),
            "concat_mask": None,
        }
        return conditioning.model_copy(update=read)

    def _pooled(self, conditioning: Conditioning) -> torch.Tensor | None:
        """The pooled prompt `(B, D)`, zeros where there is none; None where the family reads none."""
        if not self._pooled_width:
            return None
        pooled = conditioning.pooled
        if pooled is None:
            pooled = conditioning.embedding.new_zeros(len(conditioning.embedding), self._pooled_width)
        if pooled.shape[-1] != self._pooled_width:
            raise Refused(
                f"the pooled prompt has {pooled.shape[-1]} numbers, but {self._family.title} takes {self._pooled_width}: "
                f"encode the prompt with the text encoders of this model"
            )
        return pooled.to(**self._place)

    def _mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which tokens of a prompt are words, `(B, L)` bool; None where all are, or where the family reads no mask."""
        if mask is None or "attention_mask" not in self._sources:
            return None
        if mask.is_floating_point() or mask.ndim != 2:
            raise Refused(
                f"the attention mask of a prompt is {mask.dtype} of shape {tuple(mask.shape)}, but {self._family.title} "
                f"takes whole numbers of shape (batch, tokens): encode the prompt with CLIP Text Encode"
            )
        mask = mask.to(self._place["device"], torch.bool)
        return None if mask.all() else mask

    def _references(self, conditioning: Conditioning) -> tuple[torch.Tensor, ...]:
        if conditioning.references and not self._family.references:
            raise Refused(
                f"the conditioning carries reference latents ({len(conditioning.references)}), but {self._family.title} "
                f"takes none: remove Reference Latent"
            )
        return tuple(self._in_model_space(latent, "a reference latent") for latent in conditioning.references)

    def _method(self, conditioning: Conditioning) -> str:
        """Where references stand."""
        methods, method = self._family.references, conditioning.reference_method
        if not conditioning.references:
            return ""
        if method and method not in methods:
            raise Refused(
                f"the conditioning wants its reference latents placed by {method!r}, which is not available for "
                f"{self._family.title}; there are: {', '.join(methods)}"
            )
        return method or methods[0]

    def _beside(
        self, conditioning: Conditioning, x: torch.Tensor, noise_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What stands beside the channels of `x`: a picture and, where the family takes it, a mask of its pixels."""
        if not self._family.beside:
            if conditioning.concat_latent is None:
                return None
            raise Refused(
                f"the conditioning carries a picture to put beside the latent (concat_latent_image), but "
                f"{self._family.title} takes none: use the inpainting, control or image-to-video checkpoint of this model"
            )
        picture = conditioning.concat_latent
        picture = torch.zeros_like(x) if picture is None else _resized(picture.to(x), x.shape)
        parts = [self._in_model_space(picture, "the picture beside the latent")]
        if "mask" in self._family.beside:
            mask = conditioning.concat_mask if conditioning.concat_mask is not None else noise_mask
            parts.append(_mask_of_pixels(mask, x, self._family.latent.spatial).to(**self._place))
        return torch.cat(parts, dim=1)

    def _in_model_space(self, latent: torch.Tensor, what: str) -> torch.Tensor:
        form = self._family.latent
        if form.dims == 3 and latent.ndim == 4:
            latent = latent.unsqueeze(2)
        if latent.ndim != form.dims + 2 or latent.shape[1] != form.channels:
            raise Refused(
                f"{what} has shape {tuple(latent.shape)}, but {self._family.title} works on {form.channels} channels and "
                f"{form.dims} dims: encode the picture with this model's VAE"
            )
        latent = latent.to(self._place["device"], torch.float32)
        return into_model_space(latent, mean=form.mean, std=form.std).to(**self._place)


def _mask_of_pixels(mask: torch.Tensor | None, x: torch.Tensor, scale: int) -> torch.Tensor:
    """A mask as channels of the latent, `(B, scale * scale, H, W)`: the pixels under each of its places, row by row."""
    if mask is None:
        mask = torch.ones_like(x)[:, :1]
    mask = mask.to(x)
    mask = mask.reshape(-1, *(mask.shape[-3:] if mask.ndim > 3 else (1, *mask.shape[-2:]))).mean(1, keepdim=True)
    pixels = _resized(mask, (*x.shape[:2], x.shape[2] * scale, x.shape[3] * scale))
    return pixels.unflatten(3, (-1, scale)).unflatten(2, (-1, scale)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def _resized(picture: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A picture, or a batch of them, in the batch, height and width of `shape`: its middle, scaled."""
    height, width = shape[-2:]
    if picture.shape[-2:] != (height, width):
        picture = F.interpolate(_middle(picture, width / height), size=(height, width), mode="bilinear")
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
