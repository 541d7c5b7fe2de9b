"""How far a model with blocks is, told after each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..errors import Cancelled
from ..progress import ReportProgress


class GroupProgress:
    """A `ReportProgress` for some ranks alone: what stops one of the group stops all of it, and the others go on.

    `group` None: for this rank alone.
    """

    def __init__(self, progress: ReportProgress, group: dist.ProcessGroup | None) -> None:
        self._progress, self._group = progress, group

    def __call__(
        self,
        stage: str,
        step: int,
        total: int,
        *,
        preview: torch.Tensor | None = None,
        notice: str = "",
        together: bool = True,
    ) -> None:
        """Report, on every rank of the group."""
        stopped = torch.zeros(1, dtype=torch.int64)
        try:
            self._progress(stage, step, total, preview=preview, notice=notice, together=False)
        except Cancelled:
            stopped += 1
        if self._group is not None:
            dist.all_reduce(stopped, group=self._group)
        if stopped:
            raise Cancelled


@contextmanager
def reporting(blocks: Sequence[nn.Module], report: Callable[[int, int], None], *, runs: int = 1) -> Iterator[None]:
    """Call `report(step, total)` after each block, which all run `runs` times in here; the job may be cancelled there."""
    total = runs * len(blocks)
    steps = iter(range(1, total + 1))
    hooks = [block.register_forward_hook(lambda *_: report(next(steps), total)) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
