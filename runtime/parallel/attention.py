"""Attention on one rank, with what is needed to put attention over parts of the keys together."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
ALIGNMENT = 16
"""Elements a row of the bias is laid out in, for CUDA's memory efficient kernel."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Scaled dot product attention of `(B, S, H, D)`; the mask is bool (True: attend) or added, `(B, H, Sq, Sk)`."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `(B, S, H, D)` and the log of the sum of the exponents `(B, S, H, 1)`, float32, -inf for a query that
    may attend to none of the keys (its output is 0). There is at least one key.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    bias = None if mask is None else _as_bias(mask, query)
    kernel = _on_cpu if query.device.type == "cpu" else _on_cuda
    output, lse = kernel(query, key, value, bias, scale)
    output, lse = output.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)
    if bias is None:
        return output, lse
    nothing = (bias == -math.inf).all(-1, keepdim=True).transpose(1, 2)
    return output.masked_fill(nothing, 0.0), lse.masked_fill(nothing, -math.inf)


def merge(
    output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from that over each, as `attention_with_lse` gives it; worked out in float32."""
    both = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - both).nan_to_num(nan=0.0)
    return torch.lerp(output.float(), part.float(), weight), both


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)


def _on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )


def _on_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention where it can be used; the memory efficient kernel for a bias, float32 and odd head sizes."""
    width = query.shape[-1]
    if bias is None and query.dtype in HALF and width % 8 == 0 and width <= FLASH_HEAD_DIM:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=scale)
        return output, lse
    if bias is not None:
        bias = _aligned(bias, query.shape[1], query.shape[2])
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, False, scale=scale
    )
    return output, lse[..., : query.shape[2]]


def _aligned(bias: torch.Tensor, heads: int, queries: int) -> torch.Tensor:
    """A bias for every head and query, its rows on the boundaries the kernel asks for."""
    keys = bias.shape[-1]
    padded = F.pad(bias, (0, -keys % ALIGNMENT))
    return padded[..., :keys].expand(bias.shape[0], heads, queries, keys)
