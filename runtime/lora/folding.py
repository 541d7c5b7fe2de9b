"""Weights that are written anew with what a LoRA changes.

As they were they wait in host memory to be put back. Ranks that hold the same weights have what is in host memory there
once: each works out its share of the changed ones, or keeps its share of those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..linear import LocalPart, local_part
from ..offload.host_copy import Share, share

Rewrite = Callable[[torch.Tensor, LocalPart], torch.Tensor]
"""From this rank's part of a weight as it was, in float32, to what it is to be."""


class FoldedWeights:
    """The tensors of a model that are not as they were loaded. `group`: the ranks that hold the same, None for this alone."""

    def __init__(self, model: nn.Module, *, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._model, self._device, self._group = model, device, group
        self._originals: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._originals

    @property
    def nbytes(self) -> int:
        """What they take of host memory beside the model."""
        return sum(original.nbytes for original in self._originals.values())

    def write(self, changes: Mapping[str, Rewrite | None]) -> None:
        """Put these changes, None for none, into weights as they were. All ranks call it together."""
        here = {name: change for name, change in changes.items() if local_part(self._model, name) is not None}
        made, on_host = Share.of([*here], self._group), self._device.type == "cpu"
        self._keep([name for name, change in here.items() if change and name not in self], made)
        for name, change in here.items():
            if change is None:
                self._put(name, self._originals.pop(name).to(self._device))
            elif not on_host or made.has(name):
                self._put(name, self._changed(name, change))
        if on_host and self._group is not None and any(here.values()):
            own = [name for name, change in here.items() if change and made.has(name)]
            share(own, get=self._now, put=self._put, group=self._group)

    def _keep(self, names: list[str], made: Share) -> None:
        """Have these in host memory as they are. Where the model is there, that is where the model has them."""
        if self._device.type != "cpu" and self._group is not None:
            own = [name for name in names if made.has(name)]
            return share(own, get=self._now, put=self._originals.__setitem__, group=self._group)
        self._originals |= {name: self._now(name).cpu() for name in names}

    def _changed(self, name: str, change: Rewrite) -> torch.Tensor:
        original = self._originals[name]
        return change(original.to(self._device, torch.float32), local_part(self._model, name)).to(original.dtype)

    def _now(self, name: str) -> torch.Tensor:
        part = local_part(self._model, name)
        return getattr(part.module, part.leaf).data

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        part = local_part(self._model, name)
        setattr(part.module, part.leaf, nn.Parameter(tensor, requires_grad=False))
