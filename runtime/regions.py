"""Where a conditioning counts: areas and masks, with the numbers of ComfyUI."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .areas import SMALLEST_BOUNDS, Area, area_of_percent, spans_of
from .protocol import Conditioning

FEATHER = 8
Box = tuple[slice, ...]
"""An index into a latent `(B, C, ...)`."""


def resolve_region(conditioning: Conditioning, dims: Sequence[int]) -> Conditioning:
    """The conditioning with its area in latent pixels and its mask `(N, *dims)`, for a latent of these dims.

    Raises `ValueError` for an area or a mask that does not fit the latent.
    """
    changes = {"area_percent": None, "area": conditioning.area}
    if len(conditioning.area or conditioning.area_percent or ()) // 2 > len(dims):
        raise ValueError(
            "the area of a conditioning is one of a video, but this latent is of pictures: set it in 2 dims"
        )
    if conditioning.area_percent is not None:
        changes["area"] = area_of_percent(conditioning.area_percent, dims)
    if conditioning.mask is not None:
        changes["mask"] = mask = _fit_mask(conditioning.mask, dims)
        if conditioning.area_from_mask:
            changes["area"] = _bounds(mask)
    return conditioning.model_copy(update=changes)


def box_of(area: Area | None, shape: Sequence[int]) -> Box | None:
    """The part of a latent of `shape` that an area covers; None for all. Raises `ValueError` for an area outside."""
    if area is None:
        return None
    return (slice(None), slice(None), *(slice(*span) for span in spans_of(area, shape[2:])))


def weight_of(conditioning: Conditioning, box: Box | None, x: torch.Tensor) -> torch.Tensor:
    """How much an entry counts at each place of its box: broadcasts with that part of `x`. Area and mask are resolved."""
    batch, dims = x.shape[0], x.shape[2:]
    sizes = dims if box is None else [part.stop - part.start for part in box[2:]]
    if conditioning.mask is not None:
        mask = conditioning.mask[:batch].to(x.device)
        if batch % len(mask):
            raise ValueError(
                f"a mask of a conditioning has {len(mask)} pictures, which do not divide a batch of {batch}"
            )
        part = mask[:, None] if box is None else mask[:, None][box]
        part = (part * conditioning.mask_strength).repeat(batch // len(mask), *(1,) * (part.ndim - 1))
        return part * conditioning.strength
    if box is None:
        return x.new_full((1,) * x.ndim, 1.0) * conditioning.strength
    return _feathered(x.new_ones(1, 1, *sizes) * conditioning.strength, box, dims)


def _feathered(weight: torch.Tensor, box: Box, dims: Sequence[int]) -> torch.Tensor:
    """The weight of an area, falling off over up to 8 pixels towards each edge that is not the latent's own."""
    for dim, size in enumerate(dims, start=2):
        length = weight.shape[dim]
        width = min(FEATHER, length // 4)
        for place in range(width):
            share = (1.0 / width) * (place + 1)
            if box[dim].start != 0:
                weight.select(dim, place).mul_(share)
            if box[dim].stop < size:
                weight.select(dim, length - 1 - place).mul_(share)
    return weight


def _fit_mask(mask: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A mask `(H, W)`, `(N, H, W)` or `(N, F, H, W)` as `(N, *dims)`; the pictures of a mask are frames of a video."""
    if mask.ndim == 2:
        mask = mask[None]
    if mask.ndim == len(dims):
        mask = mask[None]
    if mask.ndim != len(dims) + 1:
        raise ValueError(f"a mask of a conditioning has shape {tuple(mask.shape)}: use one of height and width")
    mask = mask.float()
    if tuple(mask.shape[-2:]) != tuple(dims[-2:]):
        planes = mask if mask.ndim == 4 else mask[:, None]
        mask = F.interpolate(planes, size=tuple(dims[-2:]), mode="bilinear").reshape(*mask.shape[:-2], *dims[-2:])
    if len(dims) == 3 and mask.shape[1] not in (1, dims[0]):
        raise ValueError(
            f"a mask of a conditioning has {mask.shape[1]} frames, but the latent has {dims[0]}: use 1 mask, or one for each"
        )
    return mask.expand(-1, *dims)


def _bounds(mask: torch.Tensor) -> Area:
    """The smallest area `(H, W, Y, X)`, of at least 8 x 8, that holds all of a mask."""
    filled = mask.flatten(0, -3).ne(0).any(0)
    if not filled.any():
        return (SMALLEST_BOUNDS, SMALLEST_BOUNDS, 0, 0)
    first, last = zip(*((int(at.min()), int(at.max())) for at in torch.where(filled)), strict=True)
    sizes = (max(SMALLEST_BOUNDS, high - low + 1) for low, high in zip(first, last, strict=True))
    return (*sizes, *first)
