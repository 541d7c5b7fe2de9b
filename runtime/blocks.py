"""BlockRunner: the weights of a block come in before it runs and go out after it (layerwise offload)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .offload.slots import Slot, SlotFiller
from .offload.weights import BlockWeights


class BlockRunner:
    """Runs the streamed blocks of a model in a few slots, the weights of those to come on their way meanwhile.

    `weights` has the blocks whose weights are streamed, in the order in which they run; after the last comes the first,
    for the next step. With `prefetch` blocks on their way there are `prefetch + 1` slots. A block that a step leaves out
    costs nothing but what was fetched for it ahead.
    """

    def __init__(self, weights: Mapping[nn.Module, BlockWeights], *, prefetch: int, device: torch.device) -> None:
        self._weights, self._filler = list(weights.values()), SlotFiller(device)
        self._prefetch = min(prefetch, len(weights) - 1)
        largest = max(each.layout.nbytes for each in self._weights)
        self._free = [Slot(largest, device=device) for _ in range(self._prefetch + 1)]
        self._taken: dict[int, Slot] = {}
        self._absent = [
            [torch.empty(held.shape, dtype=held.dtype, device="meta") for held in each.layout.held]
            for each in self._weights
        ]
        for number, block in enumerate(weights):
            self._weights[number].layout.put(self._absent[number])
            block.register_forward_pre_hook(partial(self._enter, number))
            block.register_forward_hook(partial(self._leave, number), always_call=True)

    @property
    def slot_bytes(self) -> int:
        """What the slots take on the device."""
        return sum(slot.buffer.nbytes for slot in (*self._free, *self._taken.values()))

    def _enter(self, number: int, block: nn.Module, args: Any) -> None:
        if number in self._taken and self._taken[number].has_failed:
            self._give_up(number)  # perhaps in a run that has ended: what it could not read may be there now
        slot = self._taken.get(number) or self._fetch(number)
        for following in self._following(number):
            if self._free and following not in self._taken:
                self._fetch(following)
        self._filler.wait(slot)
        layout = self._weights[number].layout
        layout.put(layout.views(slot.buffer))

    def _leave(self, number: int, block: nn.Module, args: Any, output: Any) -> None:
        self._weights[number].layout.put(self._absent[number])
        self._give_up(number)

    def _following(self, number: int) -> Iterator[int]:
        return ((number + ahead) % len(self._weights) for ahead in range(1, self._prefetch + 1))

    def _fetch(self, number: int) -> Slot:
        if not self._free:  # what was fetched ahead was not what came next
            self._give_up(next(iter(self._taken)))
        slot = self._taken[number] = self._free.pop()
        self._filler.begin(slot, self._weights[number].fill)
        return slot

    def _give_up(self, number: int) -> None:
        slot = self._taken.pop(number, None)
        if slot is not None:
            self._filler.release(slot)
            self._free.append(slot)
