"""The models that a rank has loaded, within limits: the ones used longest ago make room for a new one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from .chosen_part import ChosenPart
from .free_memory import free_bytes
from .mesh import Mesh
from .rank_settings import KeepSettings, limit_of
from .release import release_memory
from .settings import ModelSettings
from .weighing import Bytes

HOST = torch.device("cpu")

log = logging.getLogger("outrigger")


class Shelf:
    """Loaded pipelines by what they were loaded for, the one used last at the end, of one of `world` ranks.

    The ranks of a mesh ask for the same models in the same order, and agree on how many make room of those that all of them
    have. The first rank may have others too, that it runs alone; what it lets go of meanwhile, the others do by `keep`.
    """

    def __init__(self, keep: KeepSettings, *, world: int, device: torch.device) -> None:
        self._keep, self._world, self._device = keep, world, device
        self._pipelines: OrderedDict[ModelSettings, Any] = OrderedDict()
        self._in_use: ModelSettings | None = None

    def __contains__(self, model: ModelSettings) -> bool:
        return model in self._pipelines

    def take(self, model: ModelSettings, *, mesh: Mesh) -> Any | None:
        """The pipeline of a model, which becomes the one used last; None when it is not loaded on every rank of the mesh, who
        call it together, or when one of its files has changed since.
        """
        self._in_use = None
        if mesh.largest(model not in self._pipelines or self._is_stale(model)):
            if model in self._pipelines:
                self._drop([model])
            return None
        self._pipelines.move_to_end(model)
        self._in_use = model
        return self._pipelines[model]

    def _is_stale(self, model: ModelSettings) -> bool:
        changed = self._pipelines[model].changed
        if changed:
            log.info("%s: what was loaded of it is not used again", changed)
        return bool(changed)

    def put(self, model: ModelSettings, pipeline: Any) -> None:
        """Keep a pipeline, as the one used last."""
        self._pipelines[model], self._in_use = pipeline, model

    def held(self) -> dict[ModelSettings, Bytes]:
        """What each model takes, the one used last at the end."""
        return {model: pipeline.held for model, pipeline in self._pipelines.items()}

    def parts_of(self, model: ModelSettings) -> tuple[ChosenPart, ...]:
        """The parts of a model beside its transformer that stay on the device."""
        return self._pipelines[model].parts

    def make_room(self, needed: Bytes, *, mesh: Mesh) -> None:
        """Let go of models whose files have changed, and of those used longest ago until what is needed fits in beside the
        others, on every rank of the mesh, who call it together. A model that is in use stays: it is a part of it that is needed.
        """
        stale = [model for model in self._others if self._is_stale(model)]
        for model in stale:
            self._pipelines.move_to_end(model, last=False)
        models = self._others
        share = Bytes(needed.device, needed.host // self._holders(mesh.degree("tensor")))
        going = models[: max(len(stale), self._too_many(models, share))]
        shared = mesh.largest(sum(map(_is_shared, going)))
        while sum(map(_is_shared, going)) < shared and len(going) < len(models):
            going.append(models[len(going)])
        self._drop(going)

    def keep(self, models: Collection[ModelSettings]) -> None:
        """Let go of all others: the first rank, without which none can be used, has these."""
        self._drop([model for model in self._pipelines if model not in models])

    def _drop(self, models: Iterable[ModelSettings]) -> None:
        for model in models:
            del self._pipelines[model]  # no name may be left that holds it when memory is released
            log.info("%s is let go of", model.model)
        release_memory()

    def _holders(self, tensor: int) -> int:
        """On how many ranks one copy in host memory counts: on those that share it, and what the first alone has, on all."""
        return max(1, self._world // tensor)

    def _share_of(self, model: ModelSettings, held: Bytes) -> Bytes:
        tensor = model.parallel.tensor if _is_shared(model) else 1
        return Bytes(held.device, held.host // self._holders(max(1, tensor)))

    @property
    def _others(self) -> list[ModelSettings]:
        """All but the one in use."""
        return [model for model in self._pipelines if model != self._in_use]

    def _too_many(self, models: Sequence[ModelSettings], needed: Bytes) -> int:
        """How many of these models, from the one used longest ago, have to go for this share of what is needed."""
        sizes = {model: self._share_of(model, held) for model, held in self.held().items()}
        limits = self._limits(sum(sizes.values(), Bytes()))
        for count, model in enumerate(models):
            taken = sum(sizes.values(), needed)
            if taken.device <= limits.device and taken.host <= limits.host:
                return count
            del sizes[model]
        return len(models)

    def _limits(self, held: Bytes) -> Bytes:
        """What loaded models may take on this rank, which takes so much now: a GPU is its own, of the host's memory each rank
        has its share.
        """
        free_device = free_bytes(self._device) + held.device if self._device.type == "cuda" else 0
        free_host = free_bytes(HOST) + held.host * self._world
        limit_host = limit_of(self._keep.host, free=free_host) // self._world
        return Bytes(limit_of(self._keep.device, free=free_device), limit_host)


def _is_shared(model: ModelSettings) -> bool:
    """Whether all ranks have it: what the first runs alone has no degree over 1."""
    return model.parallel.product > 1
