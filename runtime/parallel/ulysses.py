"""Ulysses: attention over all tokens with a part of the heads (Jacobs et al. 2023, arXiv:2309.14509).

`lengths` and `heads` are the numbers of tokens and of heads of each rank of the group, by rank; they may differ, and one
may be 0. The exchanged tensors have the token dim first, so that what each rank sends lands in place and nothing is put
together afterwards: `tokens_to_heads` gives views in `(B, S, H, D)` order that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .collectives import all_gather


def tokens_to_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lengths: Sequence[int],
    heads: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Local tokens and all heads `(B, S_local, H, D)` -> all tokens and local heads `(B, S, H_local, D)`.

    Each tensor travels while the next is made ready.
    """
    begun = [_begin_tokens_to_heads(tensor, lengths, heads, group) for tensor in (query, key, value)]
    for _, work in begun:
        work.wait()
    query, key, value = (received.transpose(0, 1) for received, _ in begun)
    return query, key, value


def _begin_tokens_to_heads(
    tensor: torch.Tensor, lengths: Sequence[int], heads: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work]:
    """Where all tokens of this rank's heads arrive, `(S, B, H_local, D)`, and what to wait for."""
    batch, local, _, width = tensor.shape
    own = heads[dist.get_rank(group)]
    sent = tensor.new_empty(local * batch * sum(heads) * width)
    sizes_out = [local * batch * count * width for count in heads]
    for place, part in zip(sent.split(sizes_out), tensor.split(list(heads), dim=2), strict=True):
        place.view(local, batch, part.shape[2], width).copy_(part.transpose(0, 1))
    received = sent.new_empty(sum(lengths), batch, own, width)
    sizes_in = [length * batch * own * width for length in lengths]
    return received, dist.all_to_all_single(received.view(-1), sent, sizes_in, sizes_out, group=group, async_op=True)


def heads_to_tokens(
    tensor: torch.Tensor, *, lengths: Sequence[int], heads: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """All tokens and local heads `(B, S, H_local, D)` -> local tokens and all heads `(B, S_local, H, D)`, contiguous."""
    batch, _, own, width = tensor.shape
    local = lengths[dist.get_rank(group)]
    sent = tensor.transpose(0, 1).contiguous()
    received = sent.new_empty(local * batch * sum(heads) * width)
    sizes_in = [local * batch * count * width for count in heads]
    sizes_out = [length * batch * own * width for length in lengths]
    dist.all_to_all_single(received, sent.view(-1), sizes_in, sizes_out, group=group)
    parts = zip(received.split(sizes_in), heads, strict=True)
    return torch.cat([part.view(local, batch, count, width).transpose(0, 1) for part, count in parts], dim=2)


def gather_tokens(tensor: torch.Tensor, *, lengths: Sequence[int], group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The local parts of every rank, joined along `dim`. Shorter ones travel with empty rows, which are dropped."""
    longest = max(lengths)
    part = tensor.movedim(dim, 0)
    part = F.pad(part, (0, 0) * (part.ndim - 1) + (0, longest - part.shape[0]))
    parts = all_gather(part, group)
    if longest == min(lengths):
        return parts.flatten(0, 1).movedim(0, dim)
    return torch.cat([parts[rank, :length] for rank, length in enumerate(lengths)]).movedim(0, dim)
