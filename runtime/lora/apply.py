"""The LoRAs of a loaded model: put on, taken off and weighed anew without loading it again.

What is low rank stays beside its weight as a pair. Everything else is folded into the weight in float32; the weight as it
was waits in main memory to be put back. Where the weight cannot be written anew, being packed or streamed, what would be
folded is worked out in each call from what the weight stands for, and its product with the input added to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..checkpoint import Shapes
from ..linear import LocalPart, ParallelLinear, local_part, parallel_linear
from ..pairs import Pair
from ..parallel.tensor import add_up
from ..settings import LoraSettings
from .changes import Change, Place
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
    """What is put on one model. All ranks make the same calls."""

    def __init__(
        self,
        model: nn.Module,
        names_of: Callable[[Shapes], Names],
        *,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model, self._device = model, device
        self._shapes = {**shapes, **_weights_of_linears(model)}
        self._held = HeldLoras(model, names_of(self._shapes), dtype=dtype)
        self._uses: dict[str, list[Use]] = {}
        self._originals: dict[str, torch.Tensor] = {}

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
        for name in sorted({*self._uses, *uses}):
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
        before = self._uses.get(name, [])
        if _are_the_same(uses, before):
            return
        folded = max((place for place, use in enumerate(uses, start=1) if use.folded), default=0)
        if not self._folds(name):
            self._work_out(name, uses[:folded])
        elif folded or name in self._originals:
            self._fold(name, uses[:folded])
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
        moved = [use.on(torch.device("cpu") if is_streamed else self._device) for use in uses]
        place = self._place(name, linear.weight_part)
        linear.change = partial(_difference, uses=moved, place=place) if uses else None

    def _fold(self, name: str, uses: list[Use]) -> None:
        """Put these into the weight as it was; none of them leaves that."""
        part = local_part(self._model, name)
        if part is None:
            return
        original = self._originals.setdefault(name, getattr(part.module, part.leaf).data.cpu())
        weight = original.to(self._device)
        if uses:
            weight = _changed(weight.float(), uses, self._place(name, part)).to(original.dtype)
        else:
            del self._originals[name]
        setattr(part.module, part.leaf, nn.Parameter(weight, requires_grad=False))

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
