"""Where a conditioning counts: areas and masks, with the numbers of ComfyUI.

An area is a size and then an offset for each dim, `(F, H, W, Z, Y, X)` or `(H, W, Y, X)`, in latent pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.nn.functional as F

from .protocol import Conditioning

WHOLE = 1 << 31
"""Size of an area along a dim that it does not limit; cut to the latent where it is used."""

SMALLEST_BOUNDS = 8
FEATHER = 8
MODEL_READS = (
    "embedding",
    "second_embedding",
    "pooled",
    "attention_mask",
    "guidance",
    "references",
    "reference_method",
    "concat_latent",
    "clip_vision",
    "clip_vision_last",
    "noise_levels",
    "frame_rate",
)
Area = tuple[int, ...]
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
        changes["area"] = _area_of_percent(conditioning.area_percent, dims)
    if conditioning.mask is not None:
        changes["mask"] = mask = _fit_mask(conditioning.mask, dims)
        if conditioning.area_from_mask:
            changes["area"] = _bounds(mask)
    return conditioning.model_copy(update=changes)


def pair_areas(*branches: Sequence[Conditioning]) -> list[list[Conditioning]]:
    """The branches of guidance, where each area of one has an entry of its own in every other.

    The entry that is added reads what the smallest entry around the area reads, and counts where and when the area does.
    """
    paired = [list(branch) for branch in branches]
    for given, other in permutations(paired, 2):
        for conditioning in given:
            other += _counterpart(conditioning, other)
    return paired


def box_of(area: Area | None, shape: Sequence[int]) -> Box | None:
    """The part of a latent of `shape` that an area covers; None for all. Raises `ValueError` for an area outside."""
    if area is None:
        return None
    dims = shape[2:]
    sizes, offsets = _halves(_in_dims(area, len(dims)))
    if any(offset >= size for offset, size in zip(offsets, dims, strict=True)):
        raise ValueError(
            f"the area of a conditioning begins at {offsets}, outside the latent of {tuple(dims)}: move the area, or make "
            f"the latent larger"
        )
    ends = [min(size, offset + own) for own, offset, size in zip(sizes, offsets, dims, strict=True)]
    if any(end == offset for end, offset in zip(ends, offsets, strict=True)):
        raise ValueError(
            f"the area of a conditioning has the size {sizes}: make it at least 1 latent pixel wide and high"
        )
    return (slice(None), slice(None), *map(slice, offsets, ends))


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


def _area_of_percent(percent: Sequence[float], dims: Sequence[int]) -> Area:
    sizes, offsets = _halves(percent)
    missing = len(dims) - len(sizes)
    sizes, offsets = (1.0,) * missing + sizes, (0.0,) * missing + offsets
    return (
        *(max(1, round(part * size)) for part, size in zip(sizes, dims, strict=True)),
        *(round(part * size) for part, size in zip(offsets, dims, strict=True)),
    )


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


def _counterpart(conditioning: Conditioning, others: Sequence[Conditioning]) -> list[Conditioning]:
    """What `others` lacks for the area of a conditioning: nothing, or one entry."""
    area = conditioning.area
    if area is None:
        return []
    around = [other for other in others if other.area is None or _holds(other.area, area)]
    with_area = [other for other in around if other.area is not None]
    if not around:
        return []
    read = min(with_area, key=lambda other: math.prod(_halves(other.area)[0])) if with_area else around[0]
    if read.area == area:
        return []
    model_reads = {name: getattr(read, name) for name in MODEL_READS}
    return [conditioning.model_copy(update=model_reads)]


def _holds(outer: Area, inner: Area) -> bool:
    """Whether an area lies in another."""
    count = max(len(outer), len(inner)) // 2
    sizes, offsets = _halves(_in_dims(outer, count))
    own_sizes, own_offsets = _halves(_in_dims(inner, count))
    return all(
        start <= own_start and own_start + own <= start + size
        for start, size, own_start, own in zip(offsets, sizes, own_offsets, own_sizes, strict=True)
    )


def _in_dims(area: Area, count: int) -> Area:
    """An area in more dims: whole along those it does not name, which come first."""
    sizes, offsets = _halves(area)
    missing = count - len(sizes)
    return (WHOLE,) * missing + sizes + (0,) * missing + offsets


def _halves(area: Sequence) -> tuple[tuple, tuple]:
    half = len(area) // 2
    return tuple(area[:half]), tuple(area[half:])
