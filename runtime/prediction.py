"""What a transformer says, as the denoised latent that samplers work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .errors import Refused
from .families.spec import FamilySpec
from .guidance import Predict
from .protocol import Conditioning
from .tokens import image_ids, pack, pad_to_patch, patches, unpack

GUIDANCE = 3.5
"""Of a model that is told its guidance, when the conditioning does not say; ComfyUI's number."""


class Predictor:
    """`(x, sigma, conditioning) -> denoised`: one branch of guidance, in float32, in the model's space."""

    def __init__(self, model: nn.Module, family: FamilySpec, *, dtype: torch.dtype) -> None:
        self._model, self._family, self._dtype = model, family, dtype

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """`x` is `(B, C, [F,] H, W)`, `sigma` has no dims, the conditioning is of the same batch, device and dtype."""
        family = self._family
        reversed_ = family.prediction == "reversed velocity"
        level = 1 - sigma if reversed_ else sigma
        timestep = (level * family.timestep_scale).to(x.device).expand(x.shape[0])
        pictures = (x.to(self._dtype), *conditioning.references)
        inputs = {argument: _input(source, conditioning, pictures, family.patch) for argument, source in family.inputs}
        latent, *references = (pad_to_patch(picture, family.patch) for picture in pictures)
        latent_shape = latent.shape
        if conditioning.concat_latent is not None:
            latent = torch.cat([latent, pad_to_patch(conditioning.concat_latent, family.patch)], dim=1)
        if family.packed:
            latent = torch.cat([pack(picture, family.patch) for picture in (latent, *references)], dim=1)
        inputs[family.latent_input] = latent
        if family.listed:
            inputs = {
                **{name: list(each) for name, each in inputs.items()},
                family.latent_input: list(latent[:, :, None]),
            }
        output = self._model(**inputs, **{family.time_input: timestep}, return_dict=False)[0]
        if family.listed:
            output = torch.cat(output, dim=1).transpose(0, 1)
        if family.packed:
            output = unpack(output, latent_shape, family.patch)
        output = output[tuple(slice(size) for size in x.shape)].float() * sigma
        return x + output if reversed_ else x - output


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


def _input(source: str, conditioning: Conditioning, pictures: tuple[torch.Tensor, ...], patch: tuple[int, ...]) -> Any:
    """What an argument of the model is given: a field of the conditioning, or what follows from it, the latent and the
    references (`pictures`).
    """
    latent = pictures[0]
    if source == "image_ids":
        return image_ids([picture.shape for picture in pictures], patch, conditioning.reference_method, latent.device)
    if source == "text_ids":
        return latent.new_zeros(conditioning.embedding.shape[1], 3, dtype=torch.float32)
    if source == "image_shapes":
        return [[patches(picture.shape, patch) for picture in pictures]] * len(latent)
    if source == "guidance":
        value = GUIDANCE if conditioning.guidance is None else conditioning.guidance
        return latent.new_full((latent.shape[0],), value, dtype=torch.float32)
    return getattr(conditioning, source)


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
