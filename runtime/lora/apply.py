"""The LoRAs of a loaded model: put on, taken off and weighed anew without loading it again.

What is low rank stays beside its weight as a pair. Everything else is folded into the weight in float32; the weight as it
was waits in main memory to be put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..checkpoint import Shapes
from ..errors import Refused
from ..families.spec import FamilySpec
from ..linear import LocalPart, Pair, ParallelLinear, local_part, parallel_linear
from ..parallel.tensor import add_up
from ..quant.plain import PlainCore
from ..settings import LoraSettings
from .changes import Change, Place
from .file import LoraFile, read_lora
from .names import WEIGHT, LayerNames


class HeldLora(NamedTuple):
    """A file that was read for this model, and this rank's part of what is low rank in it."""

    file: LoraFile
    pairs: Mapping[str, Pair]


class Use(NamedTuple):
    """One change of one tensor at a strength; `pair` where it needs not be folded."""

    change: Change
    pair: Pair | None
    strength: float


class Loras:
    """What is put on one model. All ranks make the same calls."""

    def __init__(
        self, model: nn.Module, family: FamilySpec, *, shapes: Shapes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._shapes = {**shapes, **_weights_of_linears(model)}
        self._names = LayerNames(family, self._shapes)
        self._held: dict[tuple[str, str], HeldLora] = {}
        self._uses: dict[str, list[Use]] = {}
        self._originals: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def use(self, loras: Iterable[LoraSettings]) -> tuple[str, ...]:
        """Run with these and no others from now on; a line to tell of each.

        Raises `Refused` when one of them cannot be used; then nothing has changed.
        """
        loras = [lora for lora in loras if lora.strength]
        self._held = {_key(lora): self._held.get(_key(lora)) or self._read(lora) for lora in loras}
        uses: dict[str, list[Use]] = {}
        for lora in loras:
            file, pairs = self._held[_key(lora)]
            for name, change in file.changes.items():
                uses.setdefault(name, []).append(Use(change, pairs.get(name), lora.strength))
        for name in sorted({*self._uses, *uses}):
            self._put_on(name, uses.get(name, []))
        return tuple(self._held[_key(lora)].file.report() for lora in loras)

    def _read(self, lora: LoraSettings) -> HeldLora:
        file = read_lora(lora.path, names=self._names)
        pairs = {name: pair for name, change in file.changes.items() if (pair := self._pair(name, change))}
        for name in file.changes.keys() - pairs.keys():
            if not self._can_fold(name):
                raise Refused(
                    f"{file.path.name} changes {name} by a full matrix, which needs plain weights: choose a LoRA of "
                    f"lower rank, or a model that is not quantised"
                )
        return HeldLora(file, pairs)

    def _pair(self, name: str, change: Change) -> Pair | None:
        """This rank's part of a change that is low rank, of a layer that can hold it."""
        layer = self._layer(name)
        low_rank = change.pair() if isinstance(layer, ParallelLinear | nn.Linear) and name.endswith(WEIGHT) else None
        if low_rank is None:
            return None
        pair = Pair(low_rank.down, low_rank.up, low_rank.scale)
        pair = layer.local_pair(pair) if isinstance(layer, ParallelLinear) else pair
        dtype = _weight(layer).dtype if _is_plain(layer) else self._dtype
        return pair._replace(down=pair.down.to(self._device, dtype), up=pair.up.to(self._device, dtype))

    def _can_fold(self, name: str) -> bool:
        return not name.endswith(WEIGHT) or _is_plain(self._layer(name))

    def _layer(self, name: str) -> nn.Module:
        return self._model.get_submodule(name.rpartition(".")[0])

    def _put_on(self, name: str, uses: list[Use]) -> None:
        """Make these, in their order, all that is done to a tensor: what comes after the last full matrix as pairs."""
        before = self._uses.get(name, [])
        if [(use.change, use.strength) for use in uses] == [(use.change, use.strength) for use in before]:
            return
        folded = max((place for place, use in enumerate(uses, start=1) if use.pair is None), default=0)
        if folded or name in self._originals:
            self._fold(name, uses[:folded])
        if len(uses) > folded or any(use.pair for use in before):
            linear = parallel_linear(self._model, name.removesuffix(WEIGHT))
            linear.pairs = tuple(use.pair._replace(scale=use.pair.scale * use.strength) for use in uses[folded:])
        self._uses[name] = uses
        if not uses:
            del self._uses[name]

    def _fold(self, name: str, uses: list[Use]) -> None:
        part = local_part(self._model, name)
        if part is None:
            return
        original = self._originals.setdefault(name, getattr(part.module, part.leaf).data.cpu())
        weight = original.to(self._device)
        place = Place(part.cut, self._shapes[name], partial(_sum_over, part))
        for use in uses:
            weight = use.change.apply(weight.float(), use.strength, place)
        setattr(part.module, part.leaf, nn.Parameter(weight.to(original.dtype), requires_grad=False))
        if not uses:
            del self._originals[name]


def _weights_of_linears(model: nn.Module) -> Shapes:
    """The full shape of the weight of each of our Linears, whatever tensors it is held as."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}
    return {f"{name}{WEIGHT}": torch.Size((each.out_features, each.in_features)) for name, each in linears.items()}


def _key(lora: LoraSettings) -> tuple[str, str]:
    return lora.path, lora.stamp


def _is_plain(layer: nn.Module) -> bool:
    return not isinstance(layer, ParallelLinear) or isinstance(layer.core, PlainCore)


def _weight(layer: nn.Module) -> torch.Tensor:
    return layer.core.weight if isinstance(layer, ParallelLinear) else layer.weight


def _sum_over(part: LocalPart, numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum with the other ranks' numbers, where they hold the rest of the weight along a dim."""
    return add_up(numbers, group=part.group) if part.cut.spans and part.cut.dim == dim else numbers
