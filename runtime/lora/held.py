"""The LoRA files that were read for a model: held in main memory, those in use and the last few others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ..linear import ParallelLinear
from ..pairs import Pair
from ..quant.plain import PlainCore
from ..settings import LoraSettings
from .changes import Change
from .file import read_lora
from .names import WEIGHT, Names

WAITING = 4
"""So many files are held beside those in use, so that taking one off and on again reads nothing."""


class HeldLora(NamedTuple):
    """What a file does to each tensor, by the model's name: this rank's part of a pair where it is low rank, else the
    change; and what to tell of it."""

    parts: Mapping[str, Pair | Change]
    report: str


class HeldLoras:
    """Reads files for one model, and holds them. The files themselves may be written anew meanwhile."""

    def __init__(self, model: nn.Module, names: Names, *, dtype: torch.dtype) -> None:
        self._model, self._names, self._dtype = model, names, dtype
        self._used: dict[tuple[str, str], HeldLora] = {}
        self._waiting: dict[tuple[str, str], HeldLora] = {}

    def take(self, loras: Iterable[LoraSettings]) -> list[HeldLora]:
        """What is to be in use from now on, in the order of the settings. Raises `Refused`; then nothing has changed."""
        keys = [(lora.path, lora.stamp) for lora in loras]
        known = {**self._waiting, **self._used}
        used = {key: known[key] if key in known else self._read(key[0]) for key in keys}
        waiting = [(key, held) for key, held in known.items() if key not in used]
        self._waiting, self._used = dict(waiting[-WAITING:]), used
        return [used[key] for key in keys]

    @property
    def nbytes(self) -> int:
        """What they take."""
        held = {id(file): file for file in (*self._used.values(), *self._waiting.values())}
        return sum(part.nbytes for file in held.values() for part in file.parts.values())

    def _read(self, path: str) -> HeldLora:
        file = read_lora(path, names=self._names)
        parts = {name: self._pair(name, change) or change for name, change in file.changes.items()}
        return HeldLora(parts, file.report(self._names))

    def _pair(self, name: str, change: Change) -> Pair | None:
        """This rank's part of a change that is low rank, of a layer that can hold it."""
        layer = self._layer(name)
        low_rank = change.pair() if isinstance(layer, ParallelLinear | nn.Linear) and name.endswith(WEIGHT) else None
        if low_rank is None:
            return None
        pair = Pair(low_rank.down, low_rank.up, low_rank.scale)
        pair = layer.local_pair(pair) if isinstance(layer, ParallelLinear) else pair
        dtype = plain_weight(layer).dtype if is_plain(layer) else self._dtype
        return pair._replace(down=pair.down.to(dtype), up=pair.up.to(dtype))

    def _layer(self, name: str) -> nn.Module:
        return self._model.get_submodule(name.rpartition(".")[0])


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer holds its weight as a matrix of numbers."""
    return not isinstance(layer, ParallelLinear) or isinstance(layer.core, PlainCore)


def plain_weight(layer: nn.Module) -> torch.Tensor:
    """The weight of a layer that is plain."""
    return layer.core.weight if isinstance(layer, ParallelLinear) else layer.weight


def can_fold(layer: nn.Module) -> bool:
    """Whether its weight is there all the time as a matrix of numbers: neither packed nor streamed."""
    return is_plain(layer) and not plain_weight(layer).is_meta
