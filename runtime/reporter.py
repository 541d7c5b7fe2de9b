"""How a rank tells how far its job is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .agreement import agree
from .errors import Cancelled
from .mesh import Mesh
from .protocol import MAX_NOTICE, Event, Notice, Progress

MANY_STEPS = 100
PROGRESS_SECONDS = 0.05
"""A stage of more than `MANY_STEPS` steps is told of no more often than so, but for its first and last and previews."""


class Reporter:
    """The `ReportProgress` of one job: tells the node how far it is, and has the ranks agree on a cancel."""

    def __init__(
        self, job: str, *, mesh: Mesh, send: Callable[[Event], None], cancel_came: Callable[[str], bool]
    ) -> None:
        self.stage, self.step = "", None
        self._job, self._mesh, self._send, self._cancel_came = job, mesh, send, cancel_came
        self._sent_stage, self._sent_step, self._sent_at = "", -1, 0.0

    def __call__(
        self,
        stage: str,
        step: int,
        total: int,
        *,
        preview: torch.Tensor | None = None,
        notice: str = "",
        together: bool = True,
        failure: Exception | None = None,
    ) -> None:
        """Report a point where the job may be cancelled. Raises as `agree`."""
        self.stage, self.step = stage, step
        first_rank = self._mesh.rank == 0
        if first_rank and (preview is not None or self._is_due(stage, step, total)):
            self._sent_stage, self._sent_step, self._sent_at = stage, step, time.monotonic()
            self._send(Progress(job=self._job, stage=stage, step=step, total=total, preview=preview))
        if notice:
            self._send(Notice(job=self._job, text=notice[:MAX_NOTICE]))
        stop = first_rank and self._cancel_came(self._job)
        if together:
            agree(self._mesh, stop=stop, failure=failure)
        elif stop:
            raise Cancelled

    def _is_due(self, stage: str, step: int, total: int) -> bool:
        if (stage, step) == (self._sent_stage, self._sent_step):
            return False
        if total <= MANY_STEPS or step >= total or stage != self._sent_stage:
            return True
        return time.monotonic() - self._sent_at >= PROGRESS_SECONDS
