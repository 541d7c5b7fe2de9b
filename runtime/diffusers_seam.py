"""The one place that touches diffusers' private parts: how a model's attention reaches us.

Almost every attention of a diffusers model ends in `dispatch_attention_fn(..., backend=processor._attention_backend,
parallel_config=processor._parallel_config)`. A processor that is given a backend of ours and, as parallel configuration,
an `AttentionExchange` hands us query, key and value; the others stay as they are. A processor that sets
`parallel_config` to None for cross attention thereby asks for plain local attention. The older processors call torch's
`scaled_dot_product_attention` themselves: while a module with one of them runs, a mode of torch's hands us that call.
`tests/test_sequence.py` guards this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from torch import nn
from torch.overrides import TorchFunctionMode

BACKEND_NAME = "outrigger"
WITHOUT_DISPATCH = ("JointAttnProcessor2_0", "Lumina2AttnProcessor2_0")
"""Processors that call torch's attention once, and themselves."""

MAKES_A_MASK = "HunyuanVideo15AttnProcessor2_0"
"""It makes a mask of every query and every key; diffusers' own for HunyuanVideo 1.0 does the same with a mask as it comes."""


class AttentionExchange(Protocol):
    """Attention over what all ranks have, from each rank's part of it."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """The output for this rank's queries; all `(B, S, H, D)`, the mask as `scaled_dot_product_attention` takes it."""


def route_attention(module: nn.Module, exchange: AttentionExchange) -> None:
    """Let the attention of a module (one that has a processor) run through `exchange`.

    Raises `RuntimeError` when its processor has no such seam: it would silently attend to its own tokens alone.
    """
    if type(getattr(module, "processor", None)).__name__ == MAKES_A_MASK:
        from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0

        module.set_processor(HunyuanVideoAttnProcessor2_0())
    processor = getattr(module, "processor", None)
    if type(processor).__name__ in WITHOUT_DISPATCH:
        return _catch_attention(module, exchange)
    if not (hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config")):
        raise RuntimeError(f"{type(module).__name__} with {type(processor).__name__} cannot be run over several ranks")
    processor._attention_backend = backend_named(BACKEND_NAME, _attention)
    processor._parallel_config = exchange


def _catch_attention(module: nn.Module, exchange: AttentionExchange) -> None:
    """Have torch's attention go through `exchange` while the module runs."""
    caught = _Caught(exchange)
    module.register_forward_pre_hook(lambda *_: caught.start())
    module.register_forward_hook(lambda *_: caught.end(), always_call=True)


class _Caught(TorchFunctionMode):
    """Hands torch's attention to an exchange. A mode is of one thread, as ranks in tests are."""

    def __init__(self, exchange: AttentionExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def start(self) -> None:
        """Catch the calls from now on."""
        self.__enter__()

    def end(self) -> None:
        """Let them be again."""
        self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        return (
            self._attend(*args, **kwargs) if function is F.scaled_dot_product_attention else function(*args, **kwargs)
        )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        """The arguments of torch's attention, `(B, H, S, D)`."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "_parallel_config": self._exchange}
        return _attention(query, key, value, attn_mask, **options).transpose(1, 2)


def backend_named(name: str, function: Callable[..., torch.Tensor]) -> attention_dispatch.AttentionBackendName:
    """An entry of ours in diffusers' table of backends, added on first use."""
    registry, names = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName
    for entry in list(registry._supported_arg_names):  # filled last: where ranks are threads, another may be at it
        if entry.value == name:
            return entry
    entry = str.__new__(names, name)
    entry._name_, entry._value_ = name.upper(), name
    registry.register(entry)(function)
    return entry


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: AttentionExchange | None = None,
) -> torch.Tensor:
    """Scaled dot product attention of `(B, S, H, D)`, over all ranks of the exchange when there is one."""
    if _parallel_config is None:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).transpose(1, 2)
    if is_causal or dropout_p or enable_gqa:
        raise RuntimeError("causal or grouped attention and dropout cannot be run over several ranks")
    return _parallel_config.attend(query, key, value, mask=attn_mask, scale=scale)
