"""Pictures cut along their height: what the ranks of a group say to each other around an autoencoder's layers.

`lengths` are the rows of each rank, by rank, at the resolution of the tensor; those of the last ranks may be 0. A rank
without rows takes part in every exchange, on a stand-in of one row or more that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .collectives import all_gather
from .shares import span

ROWS = -2
"""The dim of the rows in `(..., H, W)`."""


def take_rows(full: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's rows of a full `(..., H, W)`; the first again where it has none."""
    own = span(lengths, dist.get_rank(group))
    return full[..., own if own.stop > own.start else slice(0, lengths[0]), :]


def neighbour_rows(
    tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The last row of the rank before and the first of the rank after, both `(..., 1, W)`; None at an edge of the picture."""
    rank, degree = dist.get_rank(group), len(lengths)
    before, after = rank > 0 and lengths[rank] > 0, rank + 1 < degree and lengths[rank + 1] > 0
    first, last = tensor[..., :1, :], tensor[..., -1:, :]
    sizes = [0] * degree
    for peer in [rank - 1] * before + [rank + 1] * after:
        sizes[peer] = first.numel()
    sent = torch.cat([first.flatten()] * before + [last.flatten()] * after or [tensor.new_empty(0)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, sizes, sizes, group=group)
    rows = received.view(-1, *first.shape)
    return rows[0] if before else None, rows[-1] if after else None


def gather_on_first(
    tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup, dim: int
) -> torch.Tensor | None:
    """The parts of all ranks, joined along `dim`, on the first rank of the group; None on the others."""
    rank, degree = dist.get_rank(group), len(lengths)
    sent = tensor.movedim(dim, 0)[: lengths[rank]].contiguous()
    received = sent.new_empty(sum(lengths) if rank == 0 else 0, *sent.shape[1:])
    row = sent.shape[1:].numel()
    sizes_in = [length * row if rank == 0 else 0 for length in lengths]
    dist.all_to_all_single(received.view(-1), sent.view(-1), sizes_in, [sent.numel()] + [0] * (degree - 1), group=group)
    return received.movedim(0, dim) if rank == 0 else None


def moments(
    tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over the last dim, of which each rank has a part in the proportion of `lengths`: `(...)`, float32.

    Put together from those of the parts (Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm").
    """
    variance, mean = torch.var_mean(tensor.float(), dim=-1, correction=0)
    means, variances = all_gather(torch.stack((mean, variance)), group).unbind(1)
    shares = mean.new_tensor(lengths).view(-1, *(1,) * mean.ndim) / sum(lengths)
    mean = (means * shares).sum(0)
    return mean, ((variances + (means - mean).square()) * shares).sum(0)
