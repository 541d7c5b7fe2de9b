"""Ulysses: attention over all tokens with a part of the heads (Jacobs et al. 2023, arXiv:2309.14509).

`lengths` are the numbers of tokens of each rank of the group, by rank; they may differ, and one may be 0.
The exchanged tensors have the token dim first, so that what each rank sends lands in place and nothing is put together
afterwards. The results are views in `(B, S, H, D)` order that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .collectives import all_gather


def tokens_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Local tokens and all heads `(B, S_local, H, D)` -> all tokens and local heads `(B, S, H / degree, D)`.

    One exchange for the three. The degree must divide the heads.
    """
    batch, local, heads, width = query.shape
    degree = len(lengths)
    sent = query.new_empty(degree, local, 3, batch, heads // degree, width)
    for place, tensor in enumerate((query, key, value)):
        sent[:, :, place] = tensor.unflatten(2, (degree, -1)).permute(2, 1, 0, 3, 4)
    received = sent.new_empty(sum(lengths), 3, batch, heads // degree, width)
    dist.all_to_all_single(received, sent.flatten(0, 1), list(lengths), [local] * degree, group=group)
    query, key, value = (part.transpose(0, 1) for part in received.unbind(1))
    return query, key, value


def heads_to_tokens(tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens and local heads `(B, S, H / degree, D)` -> local tokens and all heads `(B, S_local, H, D)`."""
    batch, _, heads, width = tensor.shape
    degree, local = len(lengths), lengths[dist.get_rank(group)]
    sent = tensor.transpose(0, 1).contiguous()
    received = sent.new_empty(degree * local, batch, heads, width)
    dist.all_to_all_single(received, sent, [local] * degree, list(lengths), group=group)
    return received.unflatten(0, (degree, local)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def gather_tokens(tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The local parts of every rank, joined along `dim`. Shorter ones travel with empty rows, which are dropped."""
    longest = max(lengths)
    part = tensor.movedim(dim, 0)
    part = F.pad(part, (0, 0) * (part.ndim - 1) + (0, longest - part.shape[0]))
    parts = all_gather(part, group)
    if longest == min(lengths):
        return parts.flatten(0, 1).movedim(0, dim)
    return torch.cat([parts[rank, :length] for rank, length in enumerate(lengths)]).movedim(0, dim)
