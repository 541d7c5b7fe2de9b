"""Buffers on the device that weights come into, beside the computation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Fill = Callable[[torch.Tensor], None]


class Slot:
    """A buffer of bytes that holds the weights of one block at a time."""

    def __init__(self, nbytes: int, *, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.filling: Future[None] | None = None
        self.filled: torch.cuda.Event | None = None
        self.last_use: torch.cuda.Event | None = None

    @property
    def has_failed(self) -> bool:
        """Whether what should fill it has raised."""
        return self.filling is not None and self.filling.done() and self.filling.exception() is not None


class SlotFiller:
    """Fills slots in turn, in a thread, and on CUDA along a stream of its own that waits for the slot's last use."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, slot: Slot, fill: Fill) -> None:
        """Start to fill a slot."""
        slot.filling = self._thread.submit(self._fill, slot, fill)

    def wait(self, slot: Slot) -> None:
        """Have what is computed from here on find the slot filled. Raises what the filling raised."""
        slot.filling.result()
        if slot.filled is not None:
            torch.cuda.current_stream().wait_event(slot.filled)

    def release(self, slot: Slot) -> None:
        """Say that what was computed until here was the last use of what the slot holds."""
        if self._stream is not None:
            slot.last_use = torch.cuda.current_stream().record_event()

    def _fill(self, slot: Slot, fill: Fill) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # without a stream this changes nothing
            if slot.last_use is not None:
                self._stream.wait_event(slot.last_use)
            fill(slot.buffer)
            if self._stream is not None:
                slot.buffer.record_stream(self._stream)  # a model may be let go of while this is under way
                slot.filled = self._stream.record_event()
