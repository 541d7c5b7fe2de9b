"""The LoRAs of a loaded model: put on, taken off and weighed anew without loading it again.

What is low rank stays beside its weight as a pair. Everything else is folded into the weight in float32. Where the weight
cannot be written anew, being packed or streamed, what would be folded is worked out in each call from what the weight
stands for, and its product with the input added to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint import Shapes
from ..linear import LocalPart, ParallelLinear, parallel_linear
from ..pairs import Pair
from ..parallel.tensor import add_up
from ..settings import LoraSettings
from ..weighing import Bytes
from .changes import Change, Place
from .folding import FoldedWeights, Rewrite
from .held import HeldLora, HeldLoras, can_fold
from .names import WEIGHT, Names


class Use(NamedTuple):
    """What a file does to a tensor, at a strength; in the weight itself, or beside it."""

    part: Pair | Change
    strength: float
    folded: bool

    def on(self, device: torch.device) -> Use:
        """The same with its tensors on a device."""
        if isinstance(self.part, Pair):
            return self._replace(part=self.part._replace(down=self.part.down.to(device), up=self.part.up.to(device)))
        return self._replace(part=self.part.to(device))


class Loras:
    """What is put on one model. All ranks make the same calls; those of `group` hold the same weights."""

    def __init__(
        self,
        model: nn.Module,
        names_of: Callable[[Shapes], Names],
        *,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model, self._device = model, device
        self._shapes = {**shapes, **_weights_of_linears(model)}
        self._held = HeldLoras(model, names_of(self._shapes), dtype=dtype)
        self._uses: dict[str, list[Use]] = {}
        self._folded = FoldedWeights(model, device=device, group=group)
        self._moved: dict[str, list[Use]] = {}

    @property
    def held(self) -> Bytes:
        """What they take: the files in host memory, those weights that are there twice, and what lies on the device."""
        pairs = sum(layer.pairs_nbytes for layer in self._model.modules() if isinstance(layer, ParallelLinear))
        moved = sum(use.part.nbytes for uses in self._moved.values() for use in uses)
        return Bytes(host=self._held.nbytes + self._folded.nbytes) + Bytes.on(self._device, pairs + moved)

    def check(self, loras: Iterable[LoraSettings]) -> None:
        """Read what is not held yet. Raises `Refused` when one of them cannot be used."""
        self._held.take(lora for lora in loras if lora.strength)

    @torch.inference_mode()
    def use(self, loras: Iterable[LoraSettings]) -> tuple[str, ...]:
        """Run with these and no others from now on; a line to tell of each.

        Raises `Refused` when one of them cannot be used; then nothing has changed.
        """
        loras = [lora for lora in loras if lora.strength]
        held = self._held.take(loras)
        uses: dict[str, list[Use]] = {}
        for lora, file in zip(loras, held, strict=True):
            for name, part in file.parts.items():
                uses.setdefault(name, []).append(Use(part, lora.strength, self._is_folded(name, part, lora.fuse)))
        names = sorted({*self._uses, *uses})
        changed = [name for name in names if not _are_the_same(uses.get(name, []), self._uses.get(name, []))]
        self._folded.write(dict(filter(None, (self._rewrite(name, uses.get(name, [])) for name in changed))))
        for name in changed:
            self._put_on(name, uses.get(name, []))
        return tuple(file.report + self._not_folded(lora, file) for lora, file in zip(loras, held, strict=True))

    def _not_folded(self, lora: LoraSettings, file: HeldLora) -> str:
        """What to tell of a file that should be folded in, but of which some stays beside the weights."""
        kept = sum(not self._folds(name) for name in file.parts) if lora.fuse else 0
        if not kept:
            return ""
        return f"; {kept} of them not fused but kept beside their weights, which are quantised or offloaded"

    def _is_folded(self, name: str, part: Pair | Change, fuse: bool) -> bool:
        return isinstance(part, Change) or (fuse and self._folds(name))

    def _folds(self, name: str) -> bool:
        """Whether a tensor can be written anew: all can but the weights of Linears that are packed or streamed."""
        return not name.endswith(WEIGHT) or can_fold(self._model.get_submodule(name.removesuffix(WEIGHT)))

    def _put_on(self, name: str, uses: list[Use]) -> None:
        """Make these, in their order, all that is done to a tensor: what comes after the last that is folded, as pairs."""
        before, folded = self._uses.get(name, []), _count_folded(uses)
        if not self._folds(name):
            self._work_out(name, uses[:folded])
        if any(isinstance(use.part, Pair) for use in (*uses, *before)):
            linear = parallel_linear(self._model, name.removesuffix(WEIGHT))
            pairs = [part._replace(scale=part.scale * strength) for part, strength, _ in uses[folded:]]
            linear.put_pairs(pairs, device=self._device)
        if uses:
            self._uses[name] = uses
        else:
            del self._uses[name]

    def _work_out(self, name: str, uses: list[Use]) -> None:
        """Have what these add worked out from the weight in each call; none of them leaves it out. What they need lies where
        the weight does: what changes a streamed one is in main memory.
        """
        linear = self._model.get_submodule(name.removesuffix(WEIGHT))
        is_streamed = any(held.is_meta for held in linear.core.parameters())
        moved = uses if is_streamed else [use.on(self._device) for use in uses]
        self._moved[name] = [] if is_streamed or self._device.type == "cpu" else moved
        place = self._place(name, linear.weight_part)
        linear.change = partial(_difference, uses=moved, place=place) if uses else None

    def _rewrite(self, name: str, uses: list[Use]) -> tuple[str, Rewrite | None] | None:
        """What is folded into a tensor by these; None where it stays as it is."""
        folded = uses[: _count_folded(uses)]
        if not folded:
            return (name, None) if name in self._folded else None
        if not self._folds(name):
            return None
        return name, lambda weight, part: _changed(weight, folded, self._place(name, part))

    def _place(self, name: str, part: LocalPart) -> Place:
        return Place(part.cut, self._shapes[name], partial(_sum_over, part))


def _changed(weight: torch.Tensor, uses: Sequence[Use], place: Place) -> torch.Tensor:
    """This rank's part of a weight with these put on; both float32."""
    for part, strength, _ in uses:
        if isinstance(part, Pair):
            weight = weight + strength * part.scale * (part.up.to(weight) @ part.down.to(weight))
        else:
            weight = part.apply(weight, strength, place)
    return weight


def _difference(weight: torch.Tensor, *, uses: Sequence[Use], place: Place) -> torch.Tensor:
    return _changed(weight, uses, place) - weight


def _count_folded(uses: Sequence[Use]) -> int:
    """How many there are up to the last that is folded."""
    return max((place for place, use in enumerate(uses, start=1) if use.folded), default=0)


def _are_the_same(some: Sequence[Use], others: Sequence[Use]) -> bool:
    """Whether two lists do the same, number for number."""
    return len(some) == len(others) and all(
        one.part is other.part and one[1:] == other[1:] for one, other in zip(some, others, strict=True)
    )


def _weights_of_linears(model: nn.Module) -> Shapes:
    """The full shape of the weight of each of our Linears, whatever tensors it is held as."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}
    return {f"{name}{WEIGHT}": torch.Size((each.out_features, each.in_features)) for name, each in linears.items()}


def _sum_over(part: LocalPart, numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum with the other ranks' numbers, where they hold the rest of the weight along a dim."""
    return add_up(numbers, group=part.group) if part.cut.spans and part.cut.dim == dim else numbers
