"""Collectives in the shape they are used in here."""

from __future__ import annotations

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks of the group, of one shape, along a new first dim."""
    tensor = tensor.contiguous()
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    _all_gather(gathered.flatten(0, 1), tensor, group=group)
    return gathered
