"""The layers that hold a part of their weights: each takes its own from the full tensors.

They stand in for a Linear or an RMSNorm of the model before it has weights, are filled through `local_part`, and hold
plain local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .families.cuts import LinearShard, TensorSplit
from .naming import modules_called
from .pairs import JoinedPairs, Pair
from .parallel.shares import WHOLE, Cut, even_lengths, span
from .parallel.tensor import add_up, gather_features, mean_square
from .quant import CORES, Core
from .stored import Stored

WHOLE_LINEAR = LinearShard(pattern="", mode="whole")


WeightChange = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's part of a weight, `(out, in)` float32, to what is added to it."""


class LocalPart(NamedTuple):
    """Where a tensor of the model goes: a module, its own name for it, and how much of it this rank of the group holds."""

    module: nn.Module
    leaf: str
    cut: Cut
    group: dist.ProcessGroup | None = None

    def place(self, tensor: torch.Tensor) -> None:
        """Put that much of it there."""
        if isinstance(self.module, Core):
            self.module.place(self.leaf, tensor)
        else:
            self.module.load_state_dict({self.leaf: tensor}, strict=False, assign=True)


class ParallelLinear(nn.Module):
    """A Linear as a core (how the weight is held), a cut over a group and low-rank `pairs`, which may be put on and taken
    off at any time; so may a `change` of a weight that cannot be written anew, which is worked out in each call.
    `in_features` and `out_features` stay those of the whole.

    mode "whole": no exchange. "column": full input, local output. "row": local input, full output; one sum over the
    group, in which the first rank's part carries the bias. "gather": a column whose output is put together. Columns and
    rows are dealt in grains of so many features, the size of a head.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        mode: Literal["whole", "column", "row", "gather"] = "whole",
        blocks: tuple[int, ...] = (1,),
        grain: int = 1,
        group: dist.ProcessGroup | None = None,
        stored: Stored | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.mode, self._group = mode, group
        cut = WHOLE if mode == "whole" else self._share(blocks, grain)
        stored = stored or Stored()
        self.core = CORES[stored.kind](linear, cut, stored)
        elsewhere = self.core.own_bias or (mode == "row" and dist.get_rank(group))
        has_bias = linear.bias is not None and not elsewhere
        bias_cut = cut if mode in ("column", "gather") else WHOLE
        self.bias = nn.Parameter(bias_cut.take(linear.bias), requires_grad=False) if has_bias else None
        self._pairs: JoinedPairs | None = None
        self.change: WeightChange | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`, either one local as the mode says."""
        output = self.core(x, self.bias)
        if self.change is not None:
            output.add_(F.linear(x, self.change(self.core.matrix()).to(x.dtype)))
        if self._pairs is not None:  # before the exchange, so that pairs cost none of their own
            self._pairs.add_to(output, x)
        if self.mode == "row":
            return add_up(output, group=self._group)
        if self.mode == "gather":
            lengths = even_lengths(self.out_features, dist.get_world_size(self._group))
            return gather_features(output, lengths=lengths, group=self._group)
        return output

    @property
    def weight(self) -> torch.Tensor:
        """What a plain core holds. For classes that look at the weight of their Linears, as T5 does for its dtype."""
        return self.core.weight

    @property
    def weight_part(self) -> LocalPart:
        """How much of the weight this rank holds, whatever tensors it is held as."""
        return LocalPart(self.core, "weight", self.core.cut, self._group)

    def local_part(self, leaf: str) -> LocalPart | None:
        """Where the tensor that a file calls `leaf` goes; None when this rank does without it."""
        if leaf == "bias":
            return None if self.bias is None else LocalPart(self, leaf, self.core.part(leaf), self._group)
        core, own = self.core.holder(leaf)
        cut = core.part(own)
        return None if cut is None else LocalPart(core, own, cut, self._group)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """What is added to the weight."""
        return () if self._pairs is None else self._pairs.pairs

    @property
    def pairs_nbytes(self) -> int:
        """What those take that lie beside the weight, be they on or off."""
        return 0 if self._pairs is None else self._pairs.nbytes

    def put_pairs(self, pairs: Sequence[Pair], *, device: torch.device) -> None:
        """Add these to the weight from now on, and no others."""
        if self._pairs is None:
            self._pairs = JoinedPairs(device)
        self._pairs.put(pairs)

    def local_pair(self, pair: Pair) -> Pair:
        """This rank's part of a whole pair: of a column the rows that it puts out, of a row the columns that it takes in."""
        if self.mode == "row":
            return pair._replace(down=self.core.cut.take(pair.down))
        return pair._replace(up=self.core.cut.take(pair.up))

    def _share(self, blocks: tuple[int, ...], grain: int) -> Cut:
        if self.mode == "gather" and (len(blocks) > 1 or grain > 1):
            raise ValueError("a gathered output is put together as one block of single features")
        dim, size = (1, self.in_features) if self.mode == "row" else (0, self.out_features)
        rank, degree = dist.get_rank(self._group), dist.get_world_size(self._group)
        return Cut.of_blocks(dim, size, blocks=blocks, rank=rank, degree=degree, grain=grain)


class ParallelRMSNorm(nn.Module):
    """RMSNorm over a width of which each rank of the group has some (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, norm: nn.RMSNorm, *, grain: int = 1, group: dist.ProcessGroup) -> None:
        super().__init__()
        [self._width] = norm.normalized_shape
        self._eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        self._group = group
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        self._cut = Cut.of_blocks(0, self._width, blocks=(1,), rank=rank, degree=degree, grain=grain)
        self.weight = nn.Parameter(self._cut.take(norm.weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., local width)` -> the same, in the dtype of `x`, worked out in float32."""
        scale = torch.rsqrt(mean_square(x, width=self._width, group=self._group) + self._eps)
        return (x.float() * scale * self.weight).to(x.dtype)

    def local_part(self, leaf: str) -> LocalPart | None:
        """Where the weight goes."""
        return LocalPart(self, leaf, self._cut, self._group)


class ParallelEmbedding(nn.Module):
    """An Embedding of whose features each rank of the group has some: put together ("gather"), or left local ("column").

    One whose class multiplies what it finds by a number (Gemma's) does so here.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        *,
        mode: Literal["column", "gather"],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self._gathers, self._group = mode == "gather", group
        self._lengths = even_lengths(embedding.embedding_dim, dist.get_world_size(group))
        self._cut = Cut(1, (span(self._lengths, dist.get_rank(group)),))
        self._scale: float | None = getattr(embedding, "scalar_embed_scale", None)
        self.weight = nn.Parameter(self._cut.take(embedding.weight), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`(...)` -> `(..., features)`, all or the local ones."""
        output = F.embedding(ids, self.weight)
        if self._scale is not None:
            output *= output.new_tensor(self._scale)  # rounded as the class rounds it
        return gather_features(output, lengths=self._lengths, group=self._group) if self._gathers else output

    def local_part(self, leaf: str) -> LocalPart | None:
        """Where the weight goes."""
        return LocalPart(self, leaf, self._cut, self._group)


def local_part(model: nn.Module, name: str) -> LocalPart | None:
    """Where what the model's class calls `name` goes; None when this rank does without it."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, ParallelLinear | ParallelRMSNorm | ParallelEmbedding):
        return module.local_part(leaf)
    return LocalPart(module, leaf, WHOLE)


def parallel_linear(model: nn.Module, name: str) -> ParallelLinear:
    """The Linear of this name as a `ParallelLinear`, put in its place where it is not one yet. Its weights stay.

    Raises `RuntimeError` when something hooks into the Linear, which would be lost.
    """
    module = model.get_submodule(name)
    if not isinstance(module, ParallelLinear):
        if module._forward_hooks or module._forward_pre_hooks:
            raise RuntimeError(f"{name} has hooks already: make it a ParallelLinear before they are set")
        module = ParallelLinear(module)
        model.set_submodule(name, module)
    return module


def hold_hooks(model: nn.Module, patterns: Iterable[str]) -> None:
    """Make the Linears among these modules `ParallelLinear`s, so that hooks on them stay when a LoRA comes."""
    for pattern in patterns:
        for name, module in modules_called(model, pattern).items():
            if isinstance(module, nn.Linear):
                parallel_linear(model, name)


def swap_linears(
    model: nn.Module,
    split: TensorSplit,
    *,
    head_dim: int,
    group: dist.ProcessGroup | None,
    stored: Mapping[str, Stored] = MappingProxyType({}),
) -> None:
    """Put our layers in the place of those that hold a part of their weights, as the family says, or hold them in another
    way than a plain one (`stored`, by name). The model has no weights yet.

    Raises `RuntimeError` when a pattern fits no module, `ValueError` when there are fewer heads than ranks.
    """
    shards = (
        {}
        if group is None
        else {name: shard for shard in split.linears for name in modules_called(model, shard.pattern)}
    )
    for name in dict.fromkeys((*shards, *stored)):
        shard = shards.get(name, WHOLE_LINEAR)
        layer = ParallelLinear(
            model.get_submodule(name),
            mode=shard.mode,
            blocks=shard.blocks,
            grain=shard.grain(head_dim),
            group=group,
            stored=stored.get(name),
        )
        model.set_submodule(name, layer)
    if group is not None:
        _cut_attentions(model, split, head_dim, group)


def _cut_attentions(model: nn.Module, split: TensorSplit, head_dim: int, group: dist.ProcessGroup) -> None:
    """Norms over a cut width, and attentions with the heads of this rank."""
    if split.norms:
        for name in modules_called(model, split.norms):
            model.set_submodule(name, ParallelRMSNorm(model.get_submodule(name), grain=head_dim, group=group))
    for module in modules_called(model, split.tables).values() if split.tables else ():
        module.register_forward_hook(_cutting(head_dim, group))
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    for name in modules_called(model, split.attentions) if split.attentions else ():
        attention = model.get_submodule(name)
        groups, rest = divmod(attention.heads, split.together)
        if groups < degree or rest:
            raise ValueError(f"{attention.heads} heads of {name} cannot be dealt to {degree} ranks")
        attention.heads = split.together * even_lengths(groups, degree)[rank]


def _cutting(head_dim: int, group: dist.ProcessGroup) -> Callable[[nn.Module, tuple, tuple], tuple]:
    """A hook that cuts the last dim of each output as the heads are dealt."""
    place = {"blocks": (1,), "rank": dist.get_rank(group), "degree": dist.get_world_size(group), "grain": head_dim}

    def hook(module: nn.Module, args: tuple, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(Cut.of_blocks(each.ndim - 1, each.shape[-1], **place).take(each) for each in output)

    return hook
