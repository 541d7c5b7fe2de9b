"""The token dim: split on entry, exchanged around attention, gathered on exit."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .diffusers_seam import route_attention
from .families.spec import TokenSplit
from .parallel.ulysses import gather_tokens, heads_to_tokens, tokens_to_heads


def even_lengths(total: int, degree: int) -> tuple[int, ...]:
    """How many of `total` tokens each rank has; they differ by at most one."""
    return tuple(total // degree + (rank < total % degree) for rank in range(degree))


class Sequence:
    """The tokens of one model over one group: who has how many, worked out once for each new total."""

    def __init__(self, group: dist.ProcessGroup, *, dim: int) -> None:
        self._group, self._dim = group, dim
        self._rank, self._degree = dist.get_rank(group), dist.get_world_size(group)
        self._lengths: tuple[int, ...] = ()

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor."""
        total = tensor.shape[self._dim]
        if total != sum(self._lengths):
            self._lengths = even_lengths(total, self._degree)
        return tensor.split(self._lengths, dim=self._dim)[self._rank]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor from every rank's part."""
        return gather_tokens(tensor, lengths=self._lengths, group=self._group, dim=self._dim)

    def before(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Before self attention: all tokens, this rank's heads."""
        return tokens_to_heads(query, key, value, lengths=self._lengths, group=self._group)

    def after(self, output: torch.Tensor) -> torch.Tensor:
        """After self attention: this rank's tokens, all heads."""
        return heads_to_tokens(output, lengths=self._lengths, group=self._group)


def split_tokens(model: nn.Module, plan: TokenSplit, *, self_attention: str, group: dist.ProcessGroup) -> None:
    """Make a model run on this rank's share of the tokens, as its family says. Changes hooks and processors only.

    Raises `RuntimeError` when the pattern `self_attention` fits no module.
    """
    sequence = Sequence(group, dim=plan.dim)
    for name in plan.outputs:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: _each(sequence.split, output))
    for name, argument in plan.inputs:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(_splitting(sequence, module, argument), with_kwargs=True)
    for name in plan.gathered:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: _each(sequence.gather, output))
    attentions = [module for name, module in model.named_modules() if re.fullmatch(self_attention, name)]
    if not attentions:
        raise RuntimeError(f"no module of {type(model).__name__} is called {self_attention}")
    for module in attentions:
        route_attention(module, sequence)


def _each(function: Any, output: Any) -> Any:
    return tuple(map(function, output)) if isinstance(output, tuple) else function(output)


def _splitting(sequence: Sequence, module: nn.Module, argument: str) -> Any:
    """A hook that splits one argument of a module, whether it is given by place or by name."""
    place = list(inspect.signature(module.forward).parameters).index(argument)

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if argument in kwargs:
            return args, {**kwargs, argument: sequence.split(kwargs[argument])}
        return (*args[:place], sequence.split(args[place]), *args[place + 1 :]), kwargs

    return hook
