"""An autoencoder over several ranks, exactly: each works on some rows of the picture, and asks its neighbours for theirs.

A convolution gets one row more from either neighbour, and what it makes of those rows is dropped. The attention of the
middle block, at the resolution of the latent, is worked out over all rows on every rank (for Wan's VAE at 720p some 1 % of
the work of one rank). A GroupNorm adds up its statistics. Everything else in these classes works on each position alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..parallel.shares import even_lengths
from ..parallel.ulysses import gather_tokens
from ..parallel.vae import ROWS, gather_on_first, moments, neighbour_rows, take_rows

WHOLE_PICTURE = ("Attention", "WanAttentionBlock", "QwenImageAttentionBlock")
"""The classes of diffusers, in the VAEs that `split_rows` is used for, that look at all rows at once."""


class Rows:
    """Who has which rows of the latent, and of everything that is a multiple of it in size.

    `group` None: there is one rank, and it has them all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._rank, self._degree = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._lengths: tuple[int, ...] = (1,)

    def share(self, total: int) -> None:
        """Deal out the rows of a latent of that height; all ranks do it together."""
        self._lengths = even_lengths(total, self._degree)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a full `(..., H, W)`."""
        if self.group is None:
            return full
        return take_rows(full, lengths=self._scaled(full.shape[ROWS] // sum(self._lengths)), group=self.group)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """All rows, on every rank, from the local rows of each."""
        lengths = self._lengths_of(local.shape[ROWS])
        return gather_tokens(local, lengths=lengths, group=self.group, dim=local.ndim + ROWS).contiguous()

    def gather_on_first(self, local: torch.Tensor, *, dim: int) -> torch.Tensor | None:
        """All rows on the first rank, from the local rows of each along `dim`; None on the others."""
        if self.group is None:
            return local
        return gather_on_first(local, lengths=self._lengths_of(local.shape[dim]), group=self.group, dim=dim)

    def neighbours(self, local: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The row above and the row below the local ones; None at an edge of the picture."""
        return neighbour_rows(local, lengths=self._lengths, group=self.group)

    def moments(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance over a last dim that runs over all rows."""
        return moments(tensor, lengths=self._lengths, group=self.group)

    def _lengths_of(self, local: int) -> tuple[int, ...]:
        """The rows of each rank at the resolution where this one has so many."""
        return self._scaled(local // max(1, self._lengths[self._rank]))

    def _scaled(self, factor: int) -> tuple[int, ...]:
        return tuple(length * factor for length in self._lengths)


class ParallelGroupNorm(nn.Module):
    """GroupNorm over pictures of which each rank has some rows (Wu & He 2018, arXiv:1803.08494)."""

    def __init__(self, norm: nn.GroupNorm, *, rows: Rows) -> None:
        super().__init__()
        self._groups, self._eps, self._rows = norm.num_groups, norm.eps, rows
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, C, H, W)` -> the same, in the dtype of `x`, worked out in float32."""
        grouped = x.float().unflatten(1, (self._groups, -1)).flatten(2)
        mean, variance = (each.unsqueeze(-1) for each in self._rows.moments(grouped))
        normal = ((grouped - mean) * torch.rsqrt(variance + self._eps)).view(x.shape)
        weight, bias = (each.view(-1, *(1,) * (x.ndim - 2)) for each in (self.weight, self.bias))
        return (normal * weight + bias).to(x.dtype)


def split_rows(model: nn.Module, rows: Rows) -> None:
    """Make an autoencoder run on this rank's rows. Puts hooks on its layers, and layers of ours in place of its GroupNorms.

    Raises `RuntimeError` for a convolution of a shape that none of the known classes has.
    """
    whole = [name for name, module in model.named_modules() if type(module).__name__ in WHOLE_PICTURE]
    for name, module in list(model.named_modules()):
        if name in whole:
            module.register_forward_pre_hook(lambda _, args: (rows.gather(args[0]), *args[1:]))
            module.register_forward_hook(lambda _, args, output: rows.take(output))
        elif name.startswith(tuple(f"{each}." for each in whole)):
            continue
        elif isinstance(module, nn.GroupNorm):
            model.set_submodule(name, ParallelGroupNorm(module, rows=rows))
        elif isinstance(module, nn.Conv2d | nn.Conv3d) and module.kernel_size[ROWS] > 1:
            _split_convolution(name, module, rows)


def _split_convolution(name: str, convolution: nn.Conv2d | nn.Conv3d, rows: Rows) -> None:
    match convolution.kernel_size[ROWS], convolution.stride[ROWS]:
        case 3, 1:
            window = _Window(rows)
            convolution.register_forward_pre_hook(window.open)
            convolution.register_forward_hook(window.close)
        case 3, 2 if convolution.padding[ROWS] == 0:
            convolution.register_forward_pre_hook(lambda _, args: (_with_row_below(args[0], rows), *args[1:]))
        case kernel, stride:
            raise RuntimeError(f"{name} cannot be split: rows {kernel} high in steps of {stride}")


class _Window:
    """Around a convolution of three rows that pads with zeros: one row more on each side that has a neighbour."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._above, self._local = rows, 0, 0

    def open(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the rows around each tensor that goes in: the picture, and the frames before it that the class keeps."""
        self._local = args[0].shape[ROWS]
        return tuple(self._widened(each) if isinstance(each, torch.Tensor) else each for each in args)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Leave out what was made of them."""
        return output.narrow(ROWS, self._above, self._local)

    def _widened(self, local: torch.Tensor) -> torch.Tensor:
        above, below = self._rows.neighbours(local)
        self._above = int(above is not None)
        return torch.cat([each for each in (above, local, below) if each is not None], dim=ROWS)


def _with_row_below(padded: torch.Tensor, rows: Rows) -> torch.Tensor:
    """For a convolution in steps of two: the row that the class has padded with zeros becomes the neighbour's first."""
    _, below = rows.neighbours(padded)
    return padded if below is None else torch.cat((padded[..., :-1, :], below), dim=ROWS)
