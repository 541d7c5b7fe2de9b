"""Blocks of which each rank of a group copies a part, and gets the rest from the others.

Ranks that share a picture's tokens run the same blocks at the same time. Where their devices have faster links to each
other than to host memory, or share the way to it, a block is there sooner when it crosses that way once for all of them.
The copy in host memory is one for all ranks either way. On a processor every way leads through the same memory, so that
there is nothing to gain. Every rank of the group fills the same blocks in the same order, in a group that is used for
nothing else: its exchanges run beside those of the computation.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..parallel.collectives import complete
from .layout import aligned
from .weights import BlockWeights


class GatheredWeights(BlockWeights):
    """Weights of which a rank copies its part of the bytes."""

    def __init__(self, weights: BlockWeights, group: dist.ProcessGroup) -> None:
        super().__init__(weights.layout)
        self._weights, self._group = weights, group
        self._rank, self._degree = dist.get_rank(group), dist.get_world_size(group)
        self._part_bytes = aligned(-(-weights.layout.nbytes // self._degree))

    @property
    def buffer_bytes(self) -> int:
        """Equal parts, of which the last one may be filled up."""
        return self._degree * self._part_bytes

    def fill(self, buffer: torch.Tensor, start: int = 0) -> None:
        """Copy this rank's part into a buffer for the whole, and put it together with those of the others."""
        first = self._rank * self._part_bytes
        try:
            self._weights.fill(buffer[first : first + self._part_bytes], first)
        finally:  # the others wait for it
            complete(buffer[: self.buffer_bytes], self._group)


def is_faster(weights: GatheredWeights, alone: BlockWeights, group: dist.ProcessGroup, *, device: torch.device) -> bool:
    """Whether a block is there sooner when it is gathered, for the rank that waits longest: each way is tried twice, and
    the second time counts.
    """
    buffer = torch.empty(weights.buffer_bytes, dtype=torch.uint8, device=device)
    seconds = torch.tensor(
        [[_seconds(way, buffer, group) for way in (weights, alone)] for _ in range(2)][1], device=device
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return bool(seconds[0] < seconds[1])


def _seconds(weights: BlockWeights, buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """How long all ranks of the group take to fill a buffer at once."""
    dist.barrier(group)
    began = time.perf_counter()
    weights.fill(buffer)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - began
