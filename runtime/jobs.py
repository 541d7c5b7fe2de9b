"""A job of the executor: what is known of it, and in which words it fails."""

from __future__ import annotations

from dataclasses import dataclass, field

from .channel import Frames
from .plan import Plan
from .protocol import EncodeText, Failed, Progress, Work
from .ranks import Rank

KILL_HINT = ", as the system does when memory runs out"


@dataclass
class Job:
    """A request being run, whose client is `peer`, and what is known of it."""

    peer: bytes
    request: Work
    frames: Frames
    sent: bool = False
    last: Progress | None = None
    result: Frames | None = None
    stopped: bool = False
    through: set[int] = field(default_factory=set)
    failures: list[Failed] = field(default_factory=list)
    deadline: float | None = None

    @property
    def name(self) -> str:
        """The job's name on the wire."""
        return self.request.job


def failed(job: Job, message: str, *, user_error: bool = False, rank: int | None = None) -> Failed:
    """That the job failed, where it was last."""
    last = job.last
    return Failed(
        job=job.name,
        message=message[: 1 << 14],
        user_error=user_error,
        rank=rank,
        stage=last.stage if last else "",
        step=last.step if last else None,
    )


def death(job: Job, rank: Rank) -> Failed:
    """That the process of a rank has ended."""
    what = "ended; the next prompt starts new ranks" if job.sent else "did not start"
    message = f"the process of this rank on {rank.settings.device} {what} ({status_of(rank)})"
    lines = "\n".join(rank.last_lines)
    return failed(job, f"{message}. Its last lines:\n{lines}" if lines else message, rank=rank.settings.rank)


def status_of(rank: Rank) -> str:
    if (status := rank.exit_status) is None or status >= 0:
        return f"exit status {status}"
    return f"killed by signal {-status}{KILL_HINT if status == -9 else ''}"


def are_alike(job: Job, plan: Plan) -> bool:
    """Whether all ranks refused the same thing, or all that encode text for the others did: then none is ahead of another."""
    failures, refusing = job.failures, {plan.world}
    if isinstance(job.request, EncodeText) and len(job.through) == plan.world and all(f.loaded for f in failures):
        refusing.add(plan.tensor)
    return len(failures) in refusing and len({f.message for f in failures}) == 1 and not failures[0].out_of_memory
