"""The models that a rank has loaded, within limits: the ones used longest ago make room for a new one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch

from .free_memory import free_bytes
from .mesh import Mesh
from .rank_settings import KeepSettings, limit_of
from .release import release_memory
from .settings import ModelSettings
from .weighing import Bytes

HOST = torch.device("cpu")

log = logging.getLogger("outrigger")


class Shelf:
    """Loaded pipelines by what they were loaded for, the one used last at the end.

    All ranks ask for the same models in the same order, and agree on how many make room, so that they hold the same ones.
    """

    def __init__(self, keep: KeepSettings, *, mesh: Mesh) -> None:
        self._keep, self._mesh = keep, mesh
        self._pipelines: OrderedDict[ModelSettings, Any] = OrderedDict()

    def __contains__(self, model: ModelSettings) -> bool:
        return model in self._pipelines

    def take(self, model: ModelSettings) -> Any | None:
        """The pipeline of a model, which becomes the one used last; None when it is not loaded."""
        if model in self._pipelines:
            self._pipelines.move_to_end(model)
        return self._pipelines.get(model)

    def put(self, model: ModelSettings, pipeline: Any) -> None:
        """Keep a pipeline, as the one used last."""
        self._pipelines[model] = pipeline

    def held(self) -> dict[ModelSettings, Bytes]:
        """What each model takes, the one used last at the end."""
        return {model: pipeline.held for model, pipeline in self._pipelines.items()}

    def make_room(self, needed: Bytes) -> None:
        """Let go of the models used longest ago until what is needed fits in beside the others, on every rank. All ranks
        call it together.
        """
        count = self._mesh.largest(self._too_many(needed))
        for _ in range(count):
            model = next(iter(self._pipelines))
            del self._pipelines[model]  # no name may be left that holds it when memory is released
            log.info("%s makes room", model.model)
        release_memory()

    def _too_many(self, needed: Bytes) -> int:
        sizes = list(self.held().values())
        limits = self._limits(sum(sizes, Bytes()))
        for count in range(len(sizes)):
            taken = sum(sizes[count:], needed)
            if taken.device <= limits.device and taken.host <= limits.host:
                return count
        return len(sizes)

    def _limits(self, held: Bytes) -> Bytes:
        """What loaded models may take on this rank: a GPU is its own, of the host's memory each rank has its share."""
        device, world = self._mesh.device, self._mesh.world
        free_device = free_bytes(device) + held.device if device.type == "cuda" else 0
        free_host = free_bytes(HOST) + held.host * world
        limit_host = limit_of(self._keep.host, free=free_host) // world
        return Bytes(limit_of(self._keep.device, free=free_device), limit_host)
