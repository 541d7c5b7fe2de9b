"""A text encoder cut over the tensor axis: its heads, its feed-forward layers and its words."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ..linear import ParallelEmbedding, swap_linears
from ..parallel.shares import even_lengths
from .kinds import Cut


def split_encoder(model: nn.Module, cut: Cut, *, words: tuple[str, ...], group: dist.ProcessGroup) -> None:
    """Put layers with this rank's part in the place of those of an encoder without weights; `words` names its table of words."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    cut = cut.over(degree)
    swap_linears(model, cut.split, head_dim=cut.head_dim, group=group)
    outer = "text_model." if hasattr(model, "text_model") else ""
    table = ParallelEmbedding(model.get_submodule(f"{outer}{words[0]}"), mode="gather", group=group)
    for name in words:
        model.set_submodule(f"{outer}{name}", table)
    for module in list(model.modules()) if cut.heads else ():
        if hasattr(module, "n_heads"):  # T5's attention, which has a bias of places for each head
            module.n_heads = even_lengths(cut.heads, degree)[rank]
            module.inner_dim = module.n_heads * module.key_value_proj_dim  # read before transformers 5
            if module.has_relative_attention_bias:
                module.relative_attention_bias = ParallelEmbedding(
                    module.relative_attention_bias, mode="column", group=group
                )
