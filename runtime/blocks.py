"""BlockRunner: the weights of a block come in before it runs and go out after it (layerwise offload)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .errors import Refused
from .loaded_files import AGAIN
from .offload.slots import Slot, SlotFiller
from .offload.weights import BlockWeights


class BlockRunner:
    """Runs the streamed blocks of a model in a few slots, the weights of those to come on their way meanwhile.

    `weights` has the blocks whose weights are streamed, in the order in which they run; after the last comes the first,
    for the next step. With `prefetch` blocks on their way there are `prefetch + 1` slots. Whoever leaves blocks out says so
    by `expect` as soon as it is decided, and nothing is fetched for them.

    A block whose weights cannot be read raises. Where others `wait` for this rank in their exchanges it runs with what is in
    the slot instead, so that they come to where all can be told by `take_failure`.
    """

    def __init__(
        self,
        weights: Mapping[nn.Module, BlockWeights],
        *,
        prefetch: int,
        device: torch.device,
        others_wait: bool = False,
    ) -> None:
        self._weights, self._filler = list(weights.values()), SlotFiller(device)
        self._prefetch = min(prefetch, len(weights) - 1)
        largest = max(each.buffer_bytes for each in self._weights)
        self._free = [Slot(largest, device=device) for _ in range(self._prefetch + 1)]
        self._taken: dict[int, Slot] = {}
        self._running: int | None = None
        self._others_wait, self._failure = others_wait, None
        self._numbers = {block: number for number, block in enumerate(weights)}
        self._expected, self._repeats = [*self._numbers.values()], True
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

    def take_failure(self) -> Exception | None:
        """What could not be read since this was asked for last."""
        failure, self._failure = self._failure, None
        return failure

    def forget(self) -> None:
        """Let go of what was fetched ahead, and of what could not be read: the run that it was for has ended, and what a later
        one finds may be something else.
        """
        self._failure = None
        for number in list(self._taken):
            self._give_up(number)

    def expect(self, blocks: Iterable[nn.Module]) -> None:
        """Say which blocks run from here on, in their order; nothing else is fetched until told anew. Whoever decides after
        the first block of a step whether the others run expects these and the first, or the first of the next step alone.
        """
        self._expected = [self._numbers[block] for block in blocks if block in self._numbers]
        self._repeats = False
        for number in set(self._taken) - {*self._expected, self._running}:
            self._give_up(number)
        if self._running is None:
            self._fetch_ahead(self._expected[: self._prefetch])

    @torch.compiler.disable  # what compiles blocks compiles what is between the hooks
    def _enter(self, number: int, block: nn.Module, args: Any) -> None:
        if number in self._taken and self._taken[number].has_failed:
            self._give_up(number)  # perhaps in a run that has ended: what it could not read may be there now
        self._running = number
        slot = self._taken.get(number) or self._fetch(number)
        self._fetch_ahead(self._following(number))
        self._await(slot)
        layout = self._weights[number].layout
        layout.put(layout.views(slot.buffer))

    @torch.compiler.disable
    def _leave(self, number: int, block: nn.Module, args: Any, output: Any) -> None:
        self._running = None
        self._weights[number].layout.put(self._absent[number])
        self._give_up(number)

    def _await(self, slot: Slot) -> None:
        try:
            self._filler.wait(slot)
        except OSError as error:
            refused = Refused(f"the weights of a block cannot be read from their file: {error}; {AGAIN}")
            if not self._others_wait:
                raise refused from error
            refused.__cause__ = error  # which tells what memory has to do with it
            self._failure = self._failure or refused

    def _following(self, number: int) -> list[int]:
        """What is expected after a block; after one that was not expected, from the beginning."""
        place = self._expected.index(number) + 1 if number in self._expected else 0
        again = self._expected[:place] if self._repeats else []
        return [*self._expected[place:], *again][: self._prefetch]

    def _fetch_ahead(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._free and number not in self._taken:
                self._fetch(number)

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
