"""Ring attention: each rank keeps its queries, keys and values go round (Liu et al. 2023, arXiv:2310.01889).

`lengths` are the numbers of tokens of each rank of the group, by rank; they may differ, and one may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .attention import attention_with_lse, merge
from .collectives import pass_on
from .shares import span


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of the local queries over the keys and values of all ranks; all `(B, S_local, H, D)`.

    While a rank works on one part of keys and values, it passes that part on and receives the next. `mask` is
    `(B or 1, H or 1, S_local or 1, S)` over the keys of all ranks, bool (True: attend) or added.
    """
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    merged, current = None, (key.contiguous(), value.contiguous())
    for step in range(degree):
        owner = (rank - step) % degree
        if step < degree - 1:
            shape = (key.shape[0], lengths[owner - 1], *key.shape[2:])
            following = (key.new_empty(shape), value.new_empty(shape))
            waits = [pass_on(*pair, group=group) for pair in zip(current, following, strict=True)]
        if lengths[owner] and query.shape[1]:
            part_mask = None if mask is None else mask[..., span(lengths, owner)]
            part = attention_with_lse(query, *current, mask=part_mask, scale=scale)
            merged = part if merged is None else merge(*merged, *part)
        if step < degree - 1:
            for wait in waits:
                wait()
            current = following
    return query.clone() if merged is None else merged[0].to(query.dtype)
