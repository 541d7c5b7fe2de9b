"""What a model reads of a conditioning, as it takes it; what it cannot take is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .beside import fit_picture, given_frames, mask_of_pixels
from .errors import Refused
from .families.spec import FamilySpec
from .protocol import Conditioning
from .sampling.latents import into_model_space
from .unread import READ_MASKS, check_all_read, sources_of, without_effect

VISION = ("clip_vision", "clip_vision_last")


class ConditioningReader:
    """Conditionings as one model reads them: on its device and in its dtype, latents in its own space."""

    def __init__(
        self, family: FamilySpec, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._family, self._config, self._place = family, config, {"dtype": dtype, "device": device}
        self._text_width: int = config[family.text_width]
        self._pooled_width: int = config[family.pooled_width] if family.pooled_width else 0
        self._second_width: int = config[family.second_text_width] if family.second_text_width else 0
        self._vision_width: int = config[family.vision_width] if family.vision_width else 0
        self._sources = sources_of(family)

    def read(self, conditioning: Conditioning, x: torch.Tensor, noise_mask: torch.Tensor | None) -> Conditioning:
        """The conditioning for latents like `x`. Raises `Refused` for one of another model."""
        embedding = conditioning.embedding
        if embedding.ndim != 3 or embedding.shape[-1] != self._text_width:
            raise Refused(
                f"the conditioning has shape {tuple(embedding.shape)}, but {self._family.title} takes "
                f"(batch, tokens, {self._text_width}): encode the prompt with the text encoder of this model"
            )
        self._check_length(embedding)
        check_all_read(conditioning, self._family)
        for field, way_out in self._family.refuses:
            if getattr(conditioning, field):
                raise Refused(f"the conditioning carries {field} {getattr(conditioning, field)}: {way_out}")
        fill = self._family.text_fill - embedding.shape[1]
        embedding = embedding.to(**self._place)
        read = {
            "embedding": F.pad(embedding, (0, 0, fill, 0)) if fill > 0 else embedding,
            "second_embedding": self._second(conditioning),
            "pooled": self._pooled(conditioning),
            "attention_mask": self._mask(conditioning.attention_mask),
            "guidance": conditioning.guidance if "guidance" in self._sources else None,
            "references": self._references(conditioning),
            "reference_method": self._method(conditioning),
            "concat_latent": self._beside(conditioning, x, noise_mask),
            "concat_mask": None,
            **self._picture_tokens(conditioning),
            "noise_levels": self._noise_levels(noise_mask),
            "frame_rate": self._frame_rate(conditioning.frame_rate),
        }
        return conditioning.model_copy(update=read)

    def without_effect(self, branches: Iterable[Iterable[Conditioning]]) -> list[str]:
        """What these carry that changes nothing, in words, each once."""
        entries = [entry for branch in branches for entry in branch]
        told = (line for entry in entries for line in without_effect(entry, self._family, self._config))
        return list(dict.fromkeys(told))

    def _second(self, conditioning: Conditioning) -> torch.Tensor | None:
        """What the second text encoder says, of no tokens where it says nothing; None where the family reads none."""
        said, width = conditioning.second_embedding, self._second_width
        if said is None:
            return self._no_tokens(conditioning, width) if width else None
        if not width:
            raise Refused(
                f"the conditioning carries what ByT5 says, but {self._family.title} does not read it: encode the prompt with "
                f"the text encoder of this model"
            )
        if said.ndim != 3 or said.shape[-1] != width:
            raise Refused(
                f"what ByT5 says has shape {tuple(said.shape)}, but {self._family.title} takes (batch, tokens, {width}): "
                f"encode the prompt with the text encoders of this model"
            )
        return said.to(**self._place)

    def _no_tokens(self, conditioning: Conditioning, width: int) -> torch.Tensor:
        return conditioning.embedding.new_zeros(len(conditioning.embedding), 0, width).to(**self._place)

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
        if mask is None or self._sources.isdisjoint(READ_MASKS):
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
        return torch.cat([part.to(**self._place) for part in self._channels(conditioning, x, noise_mask)], dim=1)

    def _channels(
        self, conditioning: Conditioning, x: torch.Tensor, noise_mask: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        """The parts of what stands beside the latent, in the order of the family."""
        picture, form = conditioning.concat_latent, self._family.latent
        mask = conditioning.concat_mask if conditioning.concat_mask is not None else noise_mask
        for part in self._family.beside:
            if part == "mask":
                yield mask_of_pixels(mask, x, form.spatial)
            elif part == "given frames":
                yield given_frames(None if picture is None else mask, x)
            elif part == "given places":
                yield given_frames(mask, x, of_one=1)
            else:
                yield self._picture(picture, x)

    def _picture(self, picture: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """The picture beside a latent. One that is missing is zeros, of the VAE or, for a video without a frame, of the model."""
        if picture is None and self._family.latent.dims == 3:
            return torch.zeros_like(x)
        fitted = torch.zeros_like(x) if picture is None else fit_picture(picture.to(x), x.shape)
        latent = self._in_model_space(fitted, "the picture beside the latent")
        if latent.shape[2:] != x.shape[2:]:
            raise Refused(
                f"the picture beside the latent has {latent.shape[2]} frames, but the latent has {x.shape[2]}: set the same "
                f"length in the node that made it"
            )
        return latent

    def _picture_tokens(self, conditioning: Conditioning) -> dict[str, torch.Tensor | None]:
        """What CLIP vision says of a picture, `(B, tokens, D)`, at the layer that the family reads."""
        named = {name: getattr(conditioning, name) for name in VISION}
        said = {name: tokens for name, tokens in named.items() if tokens is not None}
        read = next((name for name in VISION if name in self._sources), "")
        if said and not read:
            raise Refused(
                f"the conditioning carries the output of CLIP Vision Encode, but {self._family.title} does not read it: "
                f"disconnect clip_vision_output"
            )
        if said and read not in said:
            raise Refused(
                f"the conditioning carries the output of CLIP Vision Encode without the layer that {self._family.title} reads: "
                f"connect CLIP Vision Encode itself"
            )
        if read == "clip_vision_last" and not said:
            said[read] = self._no_tokens(conditioning, self._vision_width)
        tokens = said.get(read)
        if tokens is not None and (tokens.ndim != 3 or tokens.shape[-1] != self._vision_width):
            raise Refused(
                f"the output of CLIP Vision Encode has shape {tuple(tokens.shape)}, but {self._family.title} takes (batch, "
                f"tokens, {self._vision_width}): load the CLIP vision model that goes with it"
            )
        return {name: tokens.to(**self._place) if name == read and said else None for name in VISION}

    def _noise_levels(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which part of the noise each frame `(B, F, 1, 1)` or place `(B, F, H, W)` has, by a mask that fits the latent."""
        if mask is None or not self._family.levels:
            return None
        levels = mask.mean(dim=(1, 3, 4), keepdim=True) if self._family.levels == "frame" else mask
        return levels[:, 0].to(self._place["device"])

    def _frame_rate(self, rate: float | None) -> float | None:
        """Pictures in a second of the video."""
        if rate is not None and rate <= 0:
            raise Refused(f"the conditioning carries a frame_rate of {rate:g}: set more than 0 in LTXVConditioning")
        return rate

    def _check_length(self, embedding: torch.Tensor) -> None:
        """Raise `Refused` for a prompt of nothing, and of another length than its text encoder gives, where pictures are read
        beside it.
        """
        tokens = embedding.shape[1]
        if not len(embedding) or not (tokens or self._family.text_fill):
            raise Refused(
                f"the conditioning has shape {tuple(embedding.shape)}, no token: connect a text encoder, which gives some for an "
                f"empty text, too"
            )
        if self._family.picture_tokens and tokens != self._family.text_length:
            raise Refused(
                f"the conditioning has {tokens} tokens, but {self._family.title} takes {self._family.text_length}, as CLIP Text "
                f"Encode (type wan) gives them: shorten the prompt, and do not join two"
            )

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
