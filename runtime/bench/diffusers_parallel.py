"""diffusers' own context parallelism, made to run on a CPU for the bench alone.

`enable_parallelism` divides by the number of GPUs and so cannot start here, and none of its CPU attentions gives the
log-sum-exp that its ring needs. Both are stepped around by the same calls that it makes itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..diffusers_seam import backend_named

BACKEND_NAME = "outrigger_bench"


def share_tokens(model: nn.Module, kind: str) -> None:
    """Run a model of diffusers over all ranks; `kind` is ulysses or ring. What `enable_parallelism` does."""
    context = ContextParallelConfig(**{f"{kind}_degree": dist.get_world_size()})
    mesh = init_device_mesh("cpu", mesh_shape=context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = config
            if kind == "ring":
                processor._attention_backend = backend_named(BACKEND_NAME, _ring_attention)
    apply_context_parallel(model, context, model._cp_plan)


def _ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    return attention_dispatch._templated_context_parallel_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        False,
        forward_op=_attention_with_lse,
        backward_op=None,
        _parallel_config=_parallel_config,
    )


def _attention_with_lse(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    output, lse = output.transpose(1, 2), lse.transpose(1, 2)
    return (output, lse) if return_lse else output
