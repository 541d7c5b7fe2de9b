"""What a transformer says, as the denoised latent that samplers work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .errors import Refused
from .families.spec import CLEAN, FamilySpec
from .guidance import Predict
from .protocol import Conditioning
from .tokens import image_ids, pack, pad_to_patch, patches, unpack, video_places

GUIDANCE = 3.5
"""Of a model that is told its guidance, when the conditioning does not say; ComfyUI's number."""

FRAME_RATE = 25.0
"""Of a video, when the conditioning does not say; ComfyUI's number."""


class Predictor:
    """`(x, sigma, conditioning) -> denoised`: one branch of guidance, in float32, in the model's space."""

    def __init__(self, model: nn.Module, family: FamilySpec, *, dtype: torch.dtype) -> None:
        self._model, self._family, self._dtype = model, family, dtype
        switch = family.clean_references
        self._switched = [module for module in model.modules() if switch and hasattr(module, switch)]

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """`x` is `(B, C, [F,] H, W)`, `sigma` has no dims, the conditioning is of the same batch, device and dtype."""
        family = self._family
        is_reversed = family.prediction == "reversed velocity"
        level = (1 - sigma if is_reversed else sigma) * family.timestep_scale
        timestep = level.to(x.device).expand(x.shape[0])
        if conditioning.noise_levels is not None:
            levels = conditioning.noise_levels.expand(-1, *patches(x.shape, family.patch)).flatten(1)
            timestep = levels * timestep.unsqueeze(1)
        pictures = (x.to(self._dtype), *conditioning.references)
        inputs = {argument: _input(source, conditioning, pictures, family) for argument, source in family.inputs}
        latent, *references = (pad_to_patch(picture, family.patch) for picture in pictures)
        latent_shape = latent.shape
        if conditioning.concat_latent is not None:
            latent = torch.cat([latent, pad_to_patch(conditioning.concat_latent, family.patch)], dim=1)
        if family.packed:
            latent = torch.cat([pack(picture, family.patch) for picture in (latent, *references)], dim=1)
        for module in self._switched:
            setattr(module, family.clean_references, conditioning.reference_method == CLEAN)
        output = self._run(latent, timestep, inputs)
        if family.packed:
            output = unpack(output, latent_shape, family.patch)
        change = output[tuple(slice(size) for size in x.shape)].float() * (sigma if is_reversed else -sigma)
        return change.add_(x)

    def _run(self, latent: torch.Tensor, timestep: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """What the model answers to a batch."""
        family = self._family
        time = {family.time_input: timestep, "return_dict": False}
        if not family.listed:
            return self._model(**{family.latent_input: latent}, **inputs, **time)[0]
        items = {argument: list(tensor) for argument, tensor in inputs.items()}
        pictures = self._model(**{family.latent_input: list(latent.unsqueeze(2))}, **items, **time)[0]
        return torch.stack(pictures).squeeze(2)


class ByNoise:
    """A `predict` of two experts: one for noise levels from `boundary` up, the other for those below it.

    Every rank is given the same sigma, and so turns to the same expert.
    """

    def __init__(self, high: Predict, low: Predict, *, boundary: float) -> None:
        self._high, self._low, self._boundary = high, low, boundary

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """What the expert for this sigma predicts."""
        predict = self._high if float(sigma) >= self._boundary else self._low
        return predict(x, sigma, conditioning)


def _input(source: str, conditioning: Conditioning, pictures: tuple[torch.Tensor, ...], family: FamilySpec) -> Any:
    """What an argument of the model is given: a field of the conditioning, or what follows from it, the latent and the
    references (`pictures`).
    """
    latent, patch, tokens = pictures[0], family.patch, conditioning.embedding.shape[1]
    if source in ("image_ids", "image_places"):
        shapes, method = [picture.shape for picture in pictures], conditioning.reference_method
        ids = image_ids(shapes, patch, method, latent.device, apart=family.references_apart)
        return F.pad(ids, (0, 1)) if source == "image_places" else ids
    if source == "text_ids":
        return latent.new_zeros(tokens, 3, dtype=torch.float32)
    if source == "text_places":
        return F.pad(torch.arange(tokens, dtype=torch.float32, device=latent.device)[:, None], (3, 0))
    if source == "whole_mask":
        return _whole(conditioning.embedding)
    if source == "word_mask":
        mask = conditioning.attention_mask
        return _whole(conditioning.embedding) if mask is None else mask
    if source == "second_mask":
        return _whole(conditioning.second_embedding)
    if source == "image_shapes":
        return [[patches(picture.shape, patch) for picture in pictures]] * len(latent)
    if source in ("video_places", "causal_video_places"):
        rate = FRAME_RATE if conditioning.frame_rate is None else conditioning.frame_rate
        scales = (family.latent.temporal, family.latent.spatial, family.latent.spatial)
        return video_places(latent, scales, rate=rate, causal=source == "causal_video_places")
    if source == "guidance":
        value = GUIDANCE if conditioning.guidance is None else conditioning.guidance
        return latent.new_full((latent.shape[0],), value, dtype=torch.float32)
    return getattr(conditioning, source)


def _whole(tokens: torch.Tensor) -> torch.Tensor:
    """A mask `(B, L)` that leaves no token out."""
    return torch.ones_like(tokens[..., 0], dtype=torch.bool)


def check_positions(shape: Sequence[int], family: FamilySpec, *, table: int) -> None:
    """Raise `Refused` for a latent of this shape that goes on where the model's table of positions ends."""
    most = [table * step for step in family.patch]
    if all(size <= largest for size, largest in zip(shape[2:], most, strict=True)):
        return
    frames = f" and {shape[2]} latent frames" if len(most) > 2 else ""
    pixels = [size * family.latent.spatial for size in (shape[-1], shape[-2], most[-1], most[-2])]
    raise Refused(
        f"the latent is of {pixels[0]} x {pixels[1]} pixels{frames}, but the positions of this {family.title} end at "
        f"{pixels[2]} x {pixels[3]}{f' and {most[0]}' if frames else ''}: use a smaller latent"
    )
