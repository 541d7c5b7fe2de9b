"""The weights of a block outside of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .layout import Layout
from .parts import Part


class BlockWeights:
    """Where a block's weights lie while it does not run."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def buffer_bytes(self) -> int:
        """What a buffer on the device that takes all of them has to have."""
        return self.layout.nbytes

    def fill(self, buffer: torch.Tensor, start: int = 0) -> None:
        """Copy them, from one of the layout's bytes on, into a buffer of bytes on the device."""
        raise NotImplementedError


class Piece(NamedTuple):
    """What a buffer takes of a part: from which byte of the part, to where in the buffer."""

    part: Part
    start: int
    place: slice


class ReadWeights(BlockWeights):
    """Read part by part each time: from their file, or from where the modules hold them in host memory."""

    def __init__(self, layout: Layout, parts: Sequence[Part]) -> None:
        super().__init__(layout)
        self._parts = tuple(parts)

    def fill(self, buffer: torch.Tensor, start: int = 0) -> None:
        """Read them into a buffer of bytes on the CPU."""
        pieces = list(self._pieces(start, start + len(buffer)))
        for part, first, place in pieces:
            part.announce(first, place.stop - place.start)
        for part, first, place in pieces:
            part.read_into(buffer[place], first)

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        for part, span in zip(self._parts, self.layout.spans, strict=True):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                yield Piece(part, first - span.start, slice(first - start, last - start))


class Staging:
    """A pinned buffer through which what is read from a file comes to a GPU, one block after the other."""

    def __init__(self, nbytes: int, *, device: torch.device) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None

    def fill(self, buffer: torch.Tensor, weights: ReadWeights, start: int) -> None:
        """Read weights, from one of their bytes on, into a buffer on the device, once the block before has been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        read = self._buffer[: min(len(buffer), max(0, weights.layout.nbytes - start))]
        weights.fill(read, start)
        buffer[: len(read)].copy_(read, non_blocking=True)
        if buffer.is_cuda:
            self._copied = torch.cuda.current_stream().record_event()


class StagedWeights(BlockWeights):
    """Weights that are read from a file, for a device that the file cannot be read into."""

    def __init__(self, weights: ReadWeights, staging: Staging) -> None:
        super().__init__(weights.layout)
        self._weights, self._staging = weights, staging

    def fill(self, buffer: torch.Tensor, start: int = 0) -> None:
        """Copy them into a buffer of bytes on the device."""
        self._staging.fill(buffer, self._weights, start)
