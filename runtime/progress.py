"""How the engine tells how far it is, and learns that it should stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    import torch


class ReportProgress(Protocol):
    """Called at every point where a job may be cancelled; with the same step again, where a step has several such points.

    `preview` is `(H, W, 3)` uint8, `notice` a line that the user should read. `together`: every rank makes this same
    call, so that they can agree to stop; False: this rank alone makes it. Raises `errors.Cancelled` when the job is to stop,
    and where one of the ranks calls it by `tell_failure` what that one met.
    """

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
    ) -> None: ...


def ignore_progress(
    stage: str,
    step: int,
    total: int,
    *,
    preview: torch.Tensor | None = None,
    notice: str = "",
    together: bool = True,
    failure: Exception | None = None,
) -> None:
    """Tells nobody, never stops."""


def tell_failure(progress: ReportProgress, stage: str, step: int, total: int, *, failure: Exception) -> NoReturn:
    """Make the next call of all ranks with what this one met, so that none waits for it in an exchange. Raises that."""
    progress(stage, step, total, failure=failure)
    raise failure
