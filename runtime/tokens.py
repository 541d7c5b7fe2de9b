"""Latents as tokens: patches, where they stand, and references behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F


def pack(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """`(B, C, H, W)` -> `(B, H / h * W / w, C * h * w)`: patches as tokens, row by row; and the same with frames."""
    dims = len(patch)
    for dim in range(dims, 0, -1):
        latent = latent.unflatten(dim + 1, (-1, patch[dim - 1]))
    grid, within = range(2, 2 * dims + 2, 2), range(3, 2 * dims + 3, 2)
    return latent.permute(0, *grid, 1, *within).flatten(dims + 1).flatten(1, dims)


def unpack(tokens: torch.Tensor, shape: torch.Size, patch: tuple[int, ...]) -> torch.Tensor:
    """The latent of `shape` from its patches; tokens behind them are those of references."""
    dims = len(patch)
    sizes = patches(shape, patch)
    grid = tokens[:, : math.prod(sizes)].unflatten(1, sizes).unflatten(dims + 1, (-1, *patch))
    places = [place for dim in range(1, dims + 1) for place in (dim, dims + 1 + dim)]
    return grid.permute(0, dims + 1, *places).reshape(shape)


def patches(shape: Sequence[int], patch: tuple[int, ...]) -> tuple[int, ...]:
    """How many patches a latent of this shape has along each dim, once it is padded."""
    return tuple(-(-size // step) for size, step in zip(shape[2:], patch, strict=True))


def video_places(latent: torch.Tensor, scales: Sequence[int], *, rate: float, causal: bool) -> torch.Tensor:
    """`(B, 3, tokens)` float32: second, row and column in pixels of each place of a latent of videos.

    `scales` are frames and pixels of the video for one of the latent; where that is `causal`, its first frame stands for one.
    """
    axes = [torch.arange(size, dtype=torch.float32, device=latent.device) for size in latent.shape[2:]]
    seconds, rows, columns = (axis * scale for axis, scale in zip(axes, scales, strict=True))
    if causal:
        seconds = (seconds + 1 - scales[0]).clamp(min=0)
    places = torch.cartesian_prod(seconds * (1.0 / rate), rows, columns)
    return places.T.expand(len(latent), -1, -1)


def image_ids(
    shapes: Sequence[Sequence[int]], patch: tuple[int, ...], method: str, device: torch.device, *, apart: int = 1
) -> torch.Tensor:
    """`(tokens, 3)` float32: number, row and column of each patch of a picture and its references, given their shapes;
    numbers that count references are so far `apart`.
    """
    sizes = [patches(shape, patch) for shape in shapes]
    places = [(0, 0, 0), *_places(shapes, method, patch[-1], apart)]
    return torch.cat([_grid(size, place, device) for size, place in zip(sizes, places, strict=True)])


def _grid(size: Sequence[int], place: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    axes = [torch.arange(length, device=device, dtype=torch.float32) for length in (1, *size)]
    return torch.cartesian_prod(*axes) + torch.tensor(place, device=device)


def _places(shapes: Sequence[Sequence[int]], method: str, step: int, apart: int) -> Iterator[tuple[int, int, int]]:
    """Number, row and column at which each reference begins, as ComfyUI's methods have it.

    "index": over the picture, with a number each. "uxo": one behind the other along the diagonal (arXiv:2504.02160).
    "offset": side by side, where they make the larger side grow least.
    """
    height = width = 0
    for number, (*_, own_height, own_width) in enumerate(shapes[1:], start=1):
        place, row, column = (apart * number, 0, 0) if method == "index" else (1, 0, 0)
        if method == "uxo":
            rows, columns = (-(-size // step) * step for size in shapes[0][-2:])
            place, row, column = 0, rows + height, columns + width
            height, width = height + own_height, width + own_width
        elif method == "offset":
            row, column = (0, width) if own_height + height > own_width + width else (height, 0)
            height, width = max(height, own_height + row), max(width, own_width + column)
        yield place, (row + step // 2) // step, (column + step // 2) // step


def pad_to_patch(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """A latent whose last dims are multiples of the patch: made longer by what stands at the other end, as in ComfyUI."""
    padding = []
    for size, step in zip(reversed(latent.shape[2:]), reversed(patch), strict=True):
        padding += [0, -size % step]
    return F.pad(latent, padding, mode="circular") if any(padding) else latent
