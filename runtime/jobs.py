"""A job of the executor: what is known of it, and in which words it fails."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from .channel import Frames
from .loaded_files import LoadedFiles
from .out_of_memory import SAID
from .plan import Plan
from .protocol import MAX_MESSAGE, EncodeText, Failed, Progress, Work
from .ranks import Rank
from .settings import ModelSettings

HINTS = {
    "SIGKILL": ", as the system does when memory runs out",
    "SIGBUS": ", as the system does when a file that is in use is cut short, or its disk fails",
}
"""What it may mean that a process was ended by a signal."""
TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
"""What those say who have waited in vain for another rank."""


@dataclass
class Job:
    """A request being run, whose client is `peer`, the ranks that have it (`working`), and what is known of it."""

    peer: bytes
    request: Work
    frames: Frames
    working: Sequence[Rank] = ()
    last: Progress | None = None
    result: Frames | None = None
    stopped: bool = False
    through: set[int] = field(default_factory=set)
    failures: list[Failed] = field(default_factory=list)
    deadline: float | None = None
    files: LoadedFiles = field(default_factory=LoadedFiles)
    """Those of the model, as they were when the job began."""

    @property
    def name(self) -> str:
        """The job's name on the wire."""
        return self.request.job

    @property
    def sent(self) -> bool:
        """Whether ranks have it."""
        return bool(self.working)

    @property
    def reason(self) -> Failed:
        """Why it failed: where memory ran out on one rank, what others met may follow from that; and whom they waited for."""
        failure = next((failure for failure in self.failures if failure.out_of_memory), self.failures[0])
        silent = [rank.settings for rank in self.working if rank.settings.rank not in self.through]
        if not silent or not TIMED_OUT.search(failure.message):
            return failure
        hangs = f"the process of this rank on {silent[0].device_name} hangs; the next prompt starts new ranks"
        message = f"{hangs} ({failure.message})"
        return failure.model_copy(update={"rank": silent[0].rank, "message": message[:MAX_MESSAGE]})


def files_of(model: ModelSettings) -> LoadedFiles:
    """The files that a model is read from, as they are now."""
    parts = (model.text_encoder, model.text_encoder_2, model.text_encoder_3, model.vae)
    named = (model.model, model.model_low_noise, *parts, *(lora.path for lora in model.loras))
    return LoadedFiles.of(path for path in named if os.path.isabs(path))


def failed(
    job: Job, message: str, *, user_error: bool = False, out_of_memory: bool = False, rank: int | None = None
) -> Failed:
    """That the job failed, where it was last."""
    last = job.last
    return Failed(
        job=job.name,
        message=message[:MAX_MESSAGE],
        user_error=user_error,
        out_of_memory=out_of_memory,
        rank=rank,
        stage=last.stage if last else "",
        step=last.step if last else None,
    )


def death(job: Job, rank: Rank) -> Failed:
    """That the process of a rank has ended."""
    what = "ended; the next prompt starts new ranks" if job.sent else "did not start"
    message = f"the process of this rank on {rank.settings.device_name} {what} ({status_of(rank)})"
    if changed := job.files.changed:
        message += f". {changed}"
    lines = "\n".join(rank.last_lines)
    told = f"{message}. Its last lines:\n{lines}" if lines else message
    return failed(job, told, out_of_memory=bool(SAID.search(lines)), rank=rank.settings.rank)


def status_of(rank: Rank) -> str:
    if (status := rank.exit_status) is None or status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else ""
    return f"killed by signal {-status}{HINTS.get(name, '')}"


def are_alike(job: Job, plan: Plan) -> bool:
    """Whether all ranks refused the same thing, or all that encode text for the others did: then none is ahead of another."""
    failures, refusing = job.failures, {plan.world}
    if isinstance(job.request, EncodeText) and len(job.through) == plan.world and all(f.loaded for f in failures):
        refusing.add(plan.tensor)
    return len(failures) in refusing and len({f.message for f in failures}) == 1 and not failures[0].out_of_memory
