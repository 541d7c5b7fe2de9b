"""The token dim: split on entry, exchanged around attention, gathered on exit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .diffusers_seam import route_attention
from .families.cuts import TokenPlace, TokenSplit
from .mesh import Mesh
from .naming import modules_called
from .parallel.attention import attention
from .parallel.ring import ring_attention
from .parallel.shares import even_lengths, span
from .parallel.ulysses import gather_tokens, heads_to_tokens, tokens_to_heads


class TokenGroups(NamedTuple):
    """The ranks that share the tokens, and the same ranks as a ring of Ulysses groups: `everyone` counts through the
    Ulysses group first. One of the two may be None.
    """

    everyone: dist.ProcessGroup
    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None

    @classmethod
    def along(cls, mesh: Mesh, *, ring: tuple[str, ...], ulysses: tuple[str, ...]) -> TokenGroups | None:
        """The groups along these axes of the mesh, the outer ones in the ring; None when there is one rank."""
        everyone = mesh.group(*ring, *ulysses)
        return everyone and cls(everyone, ring=mesh.group(*ring), ulysses=mesh.group(*ulysses))


class Shares(NamedTuple):
    """Who has what in attention: the tokens of all streams by rank, the same by Ulysses group (`rows`) and their sums, and
    the heads by rank of a Ulysses group.
    """

    tokens: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    sums: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, streams: Iterable[tuple[int, ...]], *, ulysses: int, heads: int) -> Shares:
        """The shares, from the numbers of tokens of each stream by rank."""
        tokens = tuple(map(sum, zip(*streams, strict=True)))
        rows = tuple(tokens[first : first + ulysses] for first in range(0, len(tokens), ulysses))
        return cls(tokens, rows, sums=tuple(map(sum, rows)), heads=even_lengths(heads, ulysses))


class Sequence:
    """The tokens of one model: who has how many, worked out once for each new total.

    They are shared along ring x ulysses, and along the cfg axis as well while that is idle: as more Ulysses where the
    `heads` of this rank allow it and there is no ring, else as a longer ring. `joined` is the order in which the tokens of
    the streams stand in attention; where it is given, every rank has a token of each stream.
    """

    def __init__(self, mesh: Mesh, *, heads: int, joined: tuple[str, ...] = ()) -> None:
        self._joined = joined
        self._narrow = TokenGroups.along(mesh, ring=("ring",), ulysses=("ulysses",))
        all_ulysses = mesh.degree("ring") == 1 and heads % (mesh.degree("cfg") * mesh.degree("ulysses")) == 0
        ring, ulysses = ((), ("cfg", "ulysses")) if all_ulysses else (("cfg", "ring"), ("ulysses",))
        self._wide = TokenGroups.along(mesh, ring=ring, ulysses=ulysses)
        self.share(over_cfg=False)

    @property
    def can_split(self) -> bool:
        """Whether there is ever more than one rank to share the tokens."""
        return self._wide is not None

    def share(self, *, over_cfg: bool) -> None:
        """Say who shares the tokens of the calls to come; all ranks do it together."""
        groups = self._groups = self._wide if over_cfg else self._narrow
        self._rank, self._degree = _place(groups and groups.everyone)
        self._ring_rank, _ = _place(groups and groups.ring)
        self._ulysses_rank, self._ulysses_degree = _place(groups and groups.ulysses)
        self._totals: dict[str, int] = {}
        self._lengths: dict[str, tuple[int, ...]] = {}
        self._shares: dict[tuple[int, str], Shares] = {}
        self._told: dict[str, torch.Tensor | None] = {}
        self._masks: dict[str, torch.Tensor] = {}
        self._mask: tuple[torch.Tensor, torch.Tensor] | None = None
        self._joint_masks: dict[str, torch.Tensor] = {}

    def split(self, tensor: torch.Tensor, place: TokenPlace) -> torch.Tensor:
        """This rank's part of a full tensor. Where there are fewer tokens than ranks, and a model cannot run on none, the
        last one is repeated, and attention leaves the filling out.
        """
        if place.behind:
            streams = (place.stream, *place.behind)
            parts = tensor.split([self._totals[stream] for stream in streams], dim=place.dim)
            places = (replace(place, stream=stream, behind=()) for stream in streams)
            return torch.cat([self.split(*each) for each in zip(parts, places, strict=True)], dim=place.dim)
        total = tensor.shape[place.dim]
        if total != self._totals.get(place.stream):
            self._totals[place.stream] = total
            self._joint_masks.clear()
            filled = max(total, self._degree) if self._joined else total
            self._lengths[place.stream] = even_lengths(filled, self._degree)
            self._shares.clear()
        filling = sum(self._lengths[place.stream]) - total
        if filling:
            tensor = torch.cat([tensor, *[tensor.narrow(place.dim, total - 1, 1)] * filling], dim=place.dim)
        return tensor.split(self._lengths[place.stream], dim=place.dim)[self._rank]

    def gather(self, tensor: torch.Tensor, place: TokenPlace) -> torch.Tensor:
        """The full tensor from every rank's part."""
        if self._groups is None:
            return tensor
        streams = (place.stream, *place.behind)
        by_rank = list(zip(*(self._lengths[stream] for stream in streams), strict=True))
        lengths, dim = tuple(map(sum, by_rank)), place.dim
        full = gather_tokens(tensor, lengths=lengths, group=self._groups.everyone, dim=dim)
        if not place.behind:
            return full.narrow(dim, 0, self._totals[place.stream])
        parts = full.split([length for rank in by_rank for length in rank], dim=dim)
        wholes = (torch.cat(parts[number :: len(streams)], dim=dim) for number in range(len(streams)))
        kept = [whole.narrow(dim, 0, self._totals[stream]) for whole, stream in zip(wholes, streams, strict=True)]
        return torch.cat(kept, dim=dim)

    def leave_out(self, stream: str, mask: torch.Tensor | None) -> None:
        """Say which tokens of a stream may be attended to in this forward, `(B, S)` and whole; None for all."""
        if mask is None or self._told.get(stream) is not mask:  # each layer may be handed the same
            self._told[stream] = mask
            self._masks.pop(stream, None)
            self._joint_masks.clear()
            if mask is not None and not mask.all():
                self._masks[stream] = mask.to(torch.bool)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        alone: str = "",
    ) -> torch.Tensor:
        """Attention of this rank's queries over the tokens of all: its tokens of every stream, or of the one that is
        `alone`, `(B, S, H, D)`.

        `mask` is for the keys of this rank, or of all in the order of the ranks: `(B or 1, H or 1, 1, S)`.
        """
        if self._leaves_out(alone):
            mask = self._mask_of_streams(mask, alone, query.device)
        if self._groups is None:
            return attention(query, key, value, mask=mask, scale=scale)
        shares = self._shares_for(query.shape[2], alone)
        if shares.tokens[self._rank : self._rank + 1] != query.shape[1:2]:
            raise RuntimeError(f"{query.shape[1]} tokens came to attention on rank {self._rank} of {shares.tokens}")
        mask = self._mask_of_all(mask, shares.tokens)
        ring, ulysses = self._groups.ring, self._groups.ulysses
        if ulysses is not None:
            row, heads = shares.rows[self._ring_rank], shares.heads
            query, key, value = tokens_to_heads(query, key, value, lengths=row, heads=heads, group=ulysses)
            mask = self._mask_of_heads(mask)
        if ring is None:
            output = attention(query, key, value, mask=mask, scale=scale)
        else:
            output = ring_attention(query, key, value, lengths=shares.sums, group=ring, mask=mask, scale=scale)
        return output if ulysses is None else heads_to_tokens(output, lengths=row, heads=heads, group=ulysses)

    def _shares_for(self, heads: int, alone: str) -> Shares:
        """Who has what in attention of so many heads: worked out once, until other numbers of tokens are split."""
        if (heads, alone) not in self._shares:
            lengths = [self._lengths[alone]] if alone else self._lengths.values()
            self._shares[heads, alone] = Shares.of(lengths, ulysses=self._ulysses_degree, heads=heads)
        return self._shares[heads, alone]

    def _leaves_out(self, alone: str) -> bool:
        """Whether there are tokens in these streams that may not be attended to."""
        streams = (alone,) if alone else self._totals
        few = self._joined and min(self._totals[stream] for stream in streams) < self._degree
        return few or not self._masks.keys().isdisjoint(streams)

    def _mask_of_streams(self, mask: torch.Tensor | None, alone: str, device: torch.device) -> torch.Tensor:
        """The mask over the keys of all ranks, `(B, 1, 1, S)`: every rank knows those of the streams whole."""
        if mask is not None:
            raise RuntimeError("a model gave attention a mask of its own, beside the one of its tokens")
        if alone not in self._joint_masks:
            batch = max(map(len, self._masks.values()), default=1)
            parts = [self._parts_of_mask(stream, batch, device) for stream in ((alone,) if alone else self._joined)]
            joint = torch.cat([part for rank in zip(*parts, strict=True) for part in rank], dim=1)
            self._joint_masks[alone] = joint[:, None, None]
        return self._joint_masks[alone]

    def _parts_of_mask(self, stream: str, batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Which tokens of a stream may be attended to, by rank."""
        lengths, total = self._lengths[stream], self._totals[stream]
        mask = self._masks.get(stream, torch.ones(1, total, dtype=torch.bool, device=device))
        return F.pad(mask, (0, sum(lengths) - total)).expand(batch, -1).split(lengths, dim=1)

    def _mask_of_all(self, mask: torch.Tensor | None, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """The mask over the keys of all ranks. A model hands the same one to every layer: it is gathered once."""
        if mask is None:
            return None
        if self._mask is None or self._mask[0] is not mask:
            self._mask = (mask, self._gathered_mask(mask, lengths))
        return self._mask[1]

    def _gathered_mask(self, mask: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        if mask.ndim != 4 or mask.shape[2] != 1:
            raise RuntimeError(f"a mask of shape {tuple(mask.shape)} cannot be split; (B, H, 1, keys) can")
        if mask.shape[3] != lengths[self._rank]:
            if mask.shape[3] == sum(lengths):
                return mask
            raise RuntimeError(f"a mask for {mask.shape[3]} keys, where {lengths} were dealt out")
        bits = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
        return gather_tokens(bits, lengths=lengths, group=self._groups.everyone, dim=3).to(mask.dtype)

    def _mask_of_heads(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a mask for each head that is for the heads of this rank."""
        if mask is None or mask.shape[1] == 1:
            return mask
        return mask[:, span(even_lengths(mask.shape[1], self._ulysses_degree), self._ulysses_rank)]


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


class OneStream:
    """Attention over the tokens of one stream of a sequence."""

    def __init__(self, sequence: Sequence, stream: str) -> None:
        self._sequence, self._stream = sequence, stream

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """As `Sequence.attend`."""
        return self._sequence.attend(query, key, value, alone=self._stream, **options)


def split_tokens(model: nn.Module, plan: TokenSplit, *, self_attention: str, sequence: Sequence) -> None:
    """Make a model run on this rank's share of the tokens, as its family says. Changes hooks and processors only.

    Raises `RuntimeError` when a pattern fits no module.
    """
    for place in plan.split:
        for module in modules_called(model, place.module).values():
            if place.argument:
                module.register_forward_pre_hook(_splitting(sequence, module, place), with_kwargs=True)
            else:
                module.register_forward_hook(_on_output(sequence.split, place))
    for place in plan.masks:
        for module in modules_called(model, place.module).values():
            module.register_forward_pre_hook(_withholding(sequence, module, place), with_kwargs=True)
    for place in plan.gathered:
        for module in modules_called(model, place.module).values():
            module.register_forward_hook(_on_output(sequence.gather, place))
    for name, module in modules_called(model, self_attention).items():
        stream = next((stream for pattern, stream in plan.alone if re.fullmatch(pattern, name)), "")
        route_attention(module, OneStream(sequence, stream) if stream else sequence)


def _on_output(function: Callable[[torch.Tensor, TokenPlace], torch.Tensor], place: TokenPlace) -> Any:
    """A hook that changes the output of a module: of several the one that is meant, or each."""

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            meant = range(len(output)) if place.item is None else (place.item,)
            return tuple(function(each, place) if item in meant else each for item, each in enumerate(output))
        return function(output, place)

    return hook


def _splitting(sequence: Sequence, module: nn.Module, place: TokenPlace) -> Any:
    """A hook that splits one argument of a module, where it is given and has the dim of the tokens."""
    return _on_argument(
        module, place.argument, lambda it: it if it is None or it.ndim <= place.dim else sequence.split(it, place)
    )


def _withholding(sequence: Sequence, module: nn.Module, place: TokenPlace) -> Any:
    """A hook that keeps a mask from a module, and has attention apply it."""
    return _on_argument(module, place.argument, lambda mask: sequence.leave_out(place.stream, mask))


def _on_argument(module: nn.Module, argument: str, change: Callable[[Any], Any]) -> Any:
    """A hook that changes one argument of a module, whether it is given by place or by name."""
    position = list(inspect.signature(module.forward).parameters).index(argument)

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if argument in kwargs:
            return args, {**kwargs, argument: change(kwargs[argument])}
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs

    return hook
