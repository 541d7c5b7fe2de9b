"""The steps of a sampler as progress of a job."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from .blocks import BlockRunner
from .loaded_files import LoadedFiles
from .previews import Draw
from .progress import ReportProgress, tell_failure

SAMPLING = "sampling"


class StepReporter:
    """Tells of each step, with a preview where there is something to draw it. Weights that could not be read, or whose file
    has been written to, end the job there, and `look` may end it that is shown the first picture. Around the steps it is a
    context, at whose end nothing is left on its way.
    """

    def __init__(
        self,
        progress: ReportProgress,
        *,
        look: Callable[[torch.Tensor], None],
        draw: Draw | None,
        runners: Collection[BlockRunner] = (),
        files: Collection[LoadedFiles] = (),
    ) -> None:
        self._progress, self._look, self._draw = progress, look, draw
        self._runners, self._files = runners, files
        self._step, self._total = 0, 1

    def __enter__(self) -> StepReporter:
        return self

    def __exit__(self, *raised: object) -> None:
        for runner in self._runners:
            runner.forget()

    def __call__(self, step: int, total: int, denoised: torch.Tensor) -> None:
        first, self._step, self._total = not self._step, step, total
        self._check_weights()
        preview = None if self._draw is None else self._draw(denoised)
        self._progress(SAMPLING, step, total, preview=preview)
        if first:  # after a rank that could not read its weights has told the others, which ends the job on all of them
            self._look(denoised)

    def check(self) -> None:
        """Stand at the step last told, behind another model call of it; the job may be cancelled here too."""
        self._check_weights()
        self._progress(SAMPLING, self._step, self._total)

    def _check_weights(self) -> None:
        for failure in [*(each.check() for each in self._files), *(each.take_failure() for each in self._runners)]:
            if failure is not None:
                tell_failure(self._progress, SAMPLING, self._step, self._total, failure=failure)
