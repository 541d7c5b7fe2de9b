"""The positions of pictures and text in rotary embeddings (Su et al. 2021, arXiv:2104.09864), where ComfyUI's are others
than diffusers'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

THETA = 10000


class CentredPositions(nn.Module):
    """Qwen-Image's: rows and columns count from the middle of each picture, text from the edge of the first one.

    Stands in for diffusers' module, which puts the middle of an odd number of rows one row lower, and lets a reference
    that is larger than the picture move the text.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self._axes = tuple(axes)

    def forward(
        self, video_fhw: Sequence[Sequence[tuple[int, int, int]]], *, max_txt_seq_len: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turns of all pictures' tokens and of the text's, `(tokens, head_dim / 2)` complex. Each item of the batch has the
        same pictures, given as (frames, rows, columns) in patches.
        """
        pictures = video_fhw[0]
        _, rows, columns = pictures[0]
        text = torch.arange(max_txt_seq_len, device=device) + max(rows // 2, columns // 2)
        places = torch.cat([_places(number, picture, device) for number, picture in enumerate(pictures)])
        return _turns(places, self._axes, THETA), _turns(text[:, None].expand(-1, 3), self._axes, THETA)


class AxisPositions(nn.Module):
    """Z-Image's and Lumina 2's: any number of text tokens, rows and columns.

    Stands in for diffusers' tables, which end.
    """

    def __init__(self, axes: Sequence[int], theta: float) -> None:
        super().__init__()
        self._axes, self._theta = tuple(axes), theta

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`(tokens, axes)` -> `(tokens, head_dim / 2)` complex."""
        return _turns(ids, self._axes, self._theta)


def _turns(places: torch.Tensor, axes: Sequence[int], theta: float) -> torch.Tensor:
    """`(tokens, axes)` -> `(tokens, head_dim / 2)` complex, worked out in float64 as ComfyUI does."""
    angles = [_angles(place, width, theta) for place, width in zip(places.unbind(1), axes, strict=True)]
    angles = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _places(number: int, picture: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Frame, row and column of each patch; of a single frame the frame is the number of the picture."""
    frames, rows, columns = (torch.arange(size, device=device) for size in picture)
    frames = frames if len(frames) > 1 else frames + number
    return torch.cartesian_prod(frames, rows - len(rows) // 2, columns - len(columns) // 2)


def _angles(places: torch.Tensor, width: int, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=places.device) / width
    return torch.outer(places.double(), theta**-exponents)
