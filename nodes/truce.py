"""The truce over memory: what the sidecar has loaded stands among the models that ComfyUI has loaded.

So ComfyUI makes room before the sidecar loads a model, a text encoder or a VAE, as it does for a model of its own, and has it
let go of everything on "Unload Models" and `/free`, when ComfyUI runs out of memory, and when another model needs the room.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import host

if TYPE_CHECKING:
    from ..runtime.client import Report


class OutriggerSidecar:
    """What ComfyUI's log calls the weights in the sidecar; ComfyUI holds it by a weak reference."""


class StandIn:
    """What ComfyUI (0.3.75 to 0.29) asks of a model that it has loaded, answered for all that the sidecar has.

    `free` has the sidecar let go of everything, and says whether it did: not while a job runs. Sizes are as the sidecar
    last told; ComfyUI measures what is free by itself.
    """

    parent = None

    def __init__(self, free: Callable[[], bool]) -> None:
        self._free = free
        self.load_device, self.offload_device = host.compute_device(), torch.device("cpu")
        self.model, self.clone_base_uuid = OutriggerSidecar(), uuid.uuid4()
        self._held = self._held_here = self._room = 0

    def make_room(self, report: Report) -> None:
        """Take a place among ComfyUI's loaded models, once it has freed what the job that was asked about is to take."""
        self.note(report)
        self._room = report.room.get(str(self.load_device), 0)
        host.hold(self)
        self._room = 0

    def note(self, report: Report) -> None:
        """Remember what the sidecar has loaded."""
        self._held_here = report.bytes_on(str(self.load_device))
        self._held = sum(report.bytes_on(device) for device in {"cpu", *(rank.device for rank in report.ranks)})

    # What ComfyUI asks

    def loaded_size(self) -> int:
        """What is loaded, on all devices: with less than that to be freed, ComfyUI asks for a part."""
        return self._held

    def model_size(self) -> int:
        """What will be loaded."""
        return self._held + self._room

    def current_loaded_device(self) -> Any:
        """Where it is."""
        return self.load_device

    def detach(self, unpatch_all: bool = True) -> Any:
        """Let go of everything; without `unpatch_all` ComfyUI only moves the entry in its list."""
        if unpatch_all and self._free():
            self._held = self._held_here = 0
        return self.model

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> float:
        """Let go of everything where that gives ComfyUI's device anything back. Where it does not, the answer is what was
        asked for, which makes ComfyUI turn to its next model; how much is free it measures.
        """
        here = self._held_here
        if not here:
            return memory_to_free
        self.detach()
        return here - self._held_here

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """Nothing: the sidecar loads when a request asks for it."""
        return 0

    def model_patches_to(self, device: Any) -> None:
        """Nothing: there are no patches."""

    def model_patches_models(self) -> list[Any]:
        """No other models come with it."""
        return []

    def get_nested_additional_models(self) -> list[Any]:
        """No other models are in it."""
        return []

    def model_dtype(self) -> None:
        """None: it differs from model to model."""

    def lowvram_patch_counter(self) -> int:
        """No patches wait."""
        return 0

    def is_clone(self, other: Any) -> bool:
        """Whether the other is this same one."""
        return other is self

    def is_dynamic(self) -> bool:
        """ComfyUI does not page its weights."""
        return False
