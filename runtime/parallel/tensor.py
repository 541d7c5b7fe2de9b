"""Tensor parallel: what the ranks of a group say to each other around cut weights (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .ulysses import gather_tokens


def add_up(tensor: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over all ranks, on every rank; the tensor itself becomes it. After a row cut."""
    dist.all_reduce(tensor, group=group)
    return tensor


def gather_features(tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """`(..., local features)` -> `(..., features)`, from every rank's part. After a column cut."""
    return gather_tokens(tensor, lengths=lengths, group=group, dim=tensor.ndim - 1)


def mean_square(tensor: torch.Tensor, *, width: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Mean of the squares over a last dim of `width` features of which each rank has some: `(..., 1)`, float32."""
    return add_up(tensor.float().pow(2).sum(-1, keepdim=True), group=group) / width
