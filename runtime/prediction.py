"""What a transformer says, as the denoised latent that samplers work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .errors import Refused
from .families.spec import FamilySpec
from .protocol import Conditioning

GUIDANCE = 3.5
"""Of a model that is told its guidance, when the conditioning does not say; ComfyUI's number."""


class Predictor:
    """`(x, sigma, conditioning) -> denoised`: one branch of guidance, in float32, in the model's space."""

    def __init__(self, model: nn.Module, family: FamilySpec, *, dtype: torch.dtype) -> None:
        self._model, self._family, self._dtype = model, family, dtype

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """`x` is `(B, C, [F,] H, W)`, `sigma` has no dims, the conditioning is of the same batch, device and dtype."""
        family = self._family
        timestep = (sigma * family.timestep_scale).to(x.device).expand(x.shape[0])
        padded = pad_to_patch(x.to(self._dtype), family.patch)
        inputs = {argument: _input(source, conditioning, padded, family.patch) for argument, source in family.inputs}
        tokens = pack(padded, family.patch) if family.packed else padded
        output = self._model(hidden_states=tokens, timestep=timestep, return_dict=False, **inputs)[0]
        if family.packed:
            output = unpack(output, padded.shape, family.patch)
        output = output[tuple(slice(size) for size in x.shape)]
        return x - output.float() * sigma


def _input(source: str, conditioning: Conditioning, latent: torch.Tensor, patch: tuple[int, ...]) -> Any:
    """What an argument of the model is given: a field of the conditioning, or what follows from it and the latent."""
    if source == "image_ids":
        return image_ids(latent, patch)
    if source == "text_ids":
        return latent.new_zeros(conditioning.embedding.shape[1], 3, dtype=torch.float32)
    if source == "image_shapes":
        return [[patches(latent.shape, patch)]] * len(latent)
    if source == "guidance":
        value = GUIDANCE if conditioning.guidance is None else conditioning.guidance
        return latent.new_full((latent.shape[0],), value, dtype=torch.float32)
    return getattr(conditioning, source)


def pack(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """`(B, C, H, W)` -> `(B, H / h * W / w, C * h * w)`: patches as tokens, row by row; and the same with frames."""
    dims = len(patch)
    for dim in range(dims, 0, -1):
        latent = latent.unflatten(dim + 1, (-1, patch[dim - 1]))
    grid, within = range(2, 2 * dims + 2, 2), range(3, 2 * dims + 3, 2)
    return latent.permute(0, *grid, 1, *within).flatten(dims + 1).flatten(1, dims)


def unpack(tokens: torch.Tensor, shape: torch.Size, patch: tuple[int, ...]) -> torch.Tensor:
    """The latent of `shape` from its patches."""
    dims = len(patch)
    grid = tokens.unflatten(1, patches(shape, patch)).unflatten(dims + 1, (-1, *patch))
    places = [place for dim in range(1, dims + 1) for place in (dim, dims + 1 + dim)]
    return grid.permute(0, dims + 1, *places).reshape(shape)


def patches(shape: Sequence[int], patch: tuple[int, ...]) -> tuple[int, ...]:
    """How many patches a latent of this shape has along each dim."""
    return tuple(size // step for size, step in zip(shape[2:], patch, strict=True))


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


def image_ids(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """`(tokens, 3)` float32: 0, row and column of each patch."""
    sizes = (1, *patches(latent.shape, patch))
    axes = [torch.arange(size, device=latent.device, dtype=torch.float32) for size in sizes]
    return torch.cartesian_prod(*axes)


def pad_to_patch(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """A latent whose last dims are multiples of the patch: made longer by what stands at the other end, as in ComfyUI."""
    padding = []
    for size, step in zip(reversed(latent.shape[2:]), reversed(patch), strict=True):
        padding += [0, -size % step]
    return F.pad(latent, padding, mode="circular") if any(padding) else latent
