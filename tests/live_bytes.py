"""Bytes of tensors that are alive, counted after every operation."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed import multi_threaded_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Sample
from runtime.settings import ModelSettings
from tests.ranks import run_as_threads


class LiveBytes(TorchDispatchMode):
    """While it is entered, `peak` is the most that tensors made meanwhile take at one time; views count once, and what the collectives
    of threads as ranks take for themselves does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        given = {self._key(tensor) for tensor in tree_leaves((args, kwargs)) if self._counts(tensor)}
        output = function(*args, **(kwargs or {}))
        if _inside(multi_threaded_pg.__file__):
            return output
        for tensor in tree_leaves(output):
            if self._counts(tensor) and (key := self._key(tensor)) not in given:
                storage = tensor.untyped_storage()
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return output

    @staticmethod
    def _counts(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not value.is_meta

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


def bytes_of_ranks(settings: ModelSettings, degrees: dict[str, int], request: Sample) -> tuple[int, int]:
    """What the rank that has most holds in host memory, and the most that tensors made in a run take beside that."""

    def run(mesh: Mesh) -> tuple[int, int]:
        pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
        with LiveBytes() as live:
            pipeline.sample(request, progress=ignore_progress)
        return pipeline.held.host, live.peak

    measured = run_as_threads(degrees, run) if degrees else [run(Mesh.single())]
    return tuple(max(each) for each in zip(*measured, strict=True))


def _inside(path: str) -> bool:
    """Whether a function of this file is being called."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame is not None
