"""Runs one job at a time on the ranks of its plan: starts them, passes bytes on, watches for their end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from .asked_room import room_for
from .channel import Bell, Frames, Listener, encode, parse, references
from .chosen_part import PartKind
from .errors import ProtocolError
from .jobs import Job, are_alike, death, failed, files_of, status_of
from .plan import Plan
from .pool import Mappings
from .protocol import (
    Cancel,
    Check,
    Event,
    Failed,
    Finished,
    Keep,
    Memory,
    Notice,
    Planned,
    Progress,
    Ready,
    Report,
    Result,
    Spread,
    Stopped,
    Work,
    event_from,
)
from .rank_settings import KeepSettings
from .ranks import WORKER, Rank, Ranks
from .settings import ModelSettings, ParallelSettings

START_SECONDS = 300.0
"""How long ranks may take to join."""
GRACE_SECONDS = 2.0
"""How long the other ranks may take once one has failed; then they wait for it in a collective."""
STOP_SECONDS = 20.0
"""The same once one has stopped: the others may be on the way to the boundary still."""
CANCELLED_SECONDS = 300.0
"""How long ranks may take to the next boundary after a cancel. Then they hang, and are replaced."""

log = logging.getLogger("outrigger")


class Executor:
    """One job at a time on the ranks of its plan.

    `answer` takes events to a client, and is False when the client is gone. `plan_for` finds the plan of a request, where so
    much host memory is held by ranks that could let go of it, or whatever there is (None); `command` starts one worker,
    `keep` is what the ranks keep loaded.
    """

    def __init__(
        self,
        *,
        listener: Listener,
        bell: Bell,
        token: str,
        home: Path,
        pool: Path | None,
        answer: Callable[[bytes, Frames], bool],
        plan_for: Callable[[Work, int | None], Plan],
        command: Sequence[str] = WORKER,
        keep: KeepSettings = KeepSettings(),
    ) -> None:
        self.job: Job | None = None
        self._listener, self._bell, self._token, self._home, self._pool = listener, bell, token, home, pool
        self._answer, self._plan_for, self._command = answer, plan_for, command
        self._segments, self._model = Mappings(pool), ""
        self._keep, self._idle_since = keep, time.monotonic()
        self._ranks: Ranks | None = None

    # What the loop calls

    def begin(self, job: Job) -> None:
        """Start a job; the ranks are started first, or replaced, where its plan asks for others than there are."""
        self.job = job
        try:
            job.files = files_of(job.request.model)
            plan = self._plan_for(job.request, self._ranks.resident_bytes if self._ranks else 0)
        except (ValueError, OSError) as error:
            return self._end(failed(job, str(error), user_error=True))
        if isinstance(job.request, Check):
            return self._end(Planned(job=job.name, seconds=0.0, plan=plan.reason, tolerance=plan.tolerance))
        if self._ranks is None or not plan.can_use(self._ranks.devices):
            self._start(plan)
        self._ranks.plan = plan
        if plan.reason:
            self._tell(Notice(job=job.name, text=plan.reason))
        self._send_when_ready()

    def cancel(self, name: str) -> None:
        """Stop the job of that name at its next step boundary, or at once when no rank has it yet."""
        job = self.job
        if job is None or job.name != name:
            return
        if not job.sent:
            return self._end(Stopped(job=name))
        job.deadline = job.deadline or time.monotonic() + CANCELLED_SECONDS
        self._to(self._ranks.working if self._ranks else (), encode(Cancel(job=name))[0])

    def hear(self, identity: bytes, frames: Frames) -> None:
        """Act on what a rank says."""
        rank, job = self._ranks.by_identity(identity) if self._ranks else None, self.job
        try:
            event: Event = parse(frames, event_from)
        except ProtocolError as error:
            log.warning("a rank sent what is not a message: %s", error)
            if rank is None or job is None:
                return
            event = failed(job, f"not a message: {error}", rank=rank.settings.rank)
        if rank and isinstance(event, Ready):
            self._joined(rank, event)
        elif rank and isinstance(event, Memory):
            self._remember(rank, event)
        elif rank and job and getattr(event, "job", "") == job.name:
            self._note(job, rank.settings.rank, event, frames)
        else:
            self._discard(event)  # of ranks that were stopped

    def ended(self, identity: bytes) -> None:
        """A rank's process has ended."""
        rank = self._ranks.by_identity(identity) if self._ranks else None
        if rank is None:
            return
        log.warning("rank %d ended (%s)", rank.settings.rank, status_of(rank))
        self.stop()
        if self.job:
            self._end(death(self.job, rank))

    def tick(self) -> None:
        """Act on a deadline that has passed."""
        deadline, job = self._deadline, self.job
        if deadline is None or time.monotonic() < deadline:
            return
        if job is None:
            log.info("no prompt for %g minutes: everything is let go of", self._keep.idle_minutes)
            return self.stop()
        if not job.sent:
            job.failures.append(failed(job, f"the ranks did not join within {START_SECONDS:.0f} s"))
        self.stop()
        self._settle(job)

    def patience(self) -> int | None:
        """Milliseconds until `tick` has something to do; None when that depends on others."""
        if self._deadline is None:
            return None
        return max(0, int((self._deadline - time.monotonic()) * 1000) + 1)

    def report(self, model: ModelSettings | None = None, part: PartKind | None = None) -> Report:
        """What there is and what it does, and what a job with this model, and this part of it, would still take."""
        ranks, room = self._ranks, {}
        if model is not None:
            find_plan = partial(self._plan_for, Work(job="status", model=model), None)
            room = room_for(model, part, loaded=ranks.all[0].memory.models if ranks else (), find_plan=find_plan)
        return Report(
            pid=os.getpid(),
            ranks=tuple(rank.report() for rank in ranks.all) if ranks else (),
            devices=ranks.devices if ranks else (),
            model=self._model,
            busy=self.job.name if self.job else "",
            room=room,
        )

    def free(self) -> None:
        """Let go of everything, unless a job runs: the processes end, so that nothing of theirs is left."""
        if self.job is None and self._ranks:
            log.info("everything that is loaded is let go of")
            self.stop()

    def stop(self) -> None:
        """Stop all ranks."""
        if self._ranks:
            self._ranks.stop()
            self._ranks, self._model = None, ""

    @property
    def _deadline(self) -> float | None:
        """When `tick` has something to do: the job's, or that of what has been idle for too long."""
        if self.job is not None:
            return self.job.deadline
        limit = 60.0 * self._keep.idle_minutes
        return self._idle_since + limit if self._ranks and limit else None

    # Ranks

    def _remember(self, rank: Rank, memory: Memory) -> None:
        """What a rank has loaded. Those that have no part in the job keep what the first has too, and nothing else."""
        rank.memory = memory
        if rank is self._ranks.all[0]:
            self._to(self._ranks.idle, encode(Keep(models=tuple(held.model for held in memory.models)))[0])

    def _start(self, plan: Plan) -> None:
        self.stop()
        log.info("starting %d rank%s: %s", plan.world, "s"[: plan.world > 1], plan.reason or ", ".join(plan.devices))
        self._ranks = Ranks(
            plan,
            endpoint=self._listener.endpoint,
            token=self._token,
            home=self._home,
            pool=self._pool,
            command=self._command,
            bell=self._bell,
            keep=self._keep,
        )

    def _joined(self, rank: Rank, event: Ready) -> None:
        if event.token != self._token:
            return log.warning("something that is not rank %d called itself so", rank.settings.rank)
        rank.ready = True
        self._send_when_ready()

    def _send_when_ready(self) -> None:
        job, ranks = self.job, self._ranks
        if job is None or ranks is None or job.sent:
            return
        if ranks.ready < len(ranks.all):
            job.deadline = job.deadline or time.monotonic() + START_SECONDS
            return self._tell(Progress(job=job.name, stage="starting ranks", step=ranks.ready, total=len(ranks.all)))
        if ranks.degrees != ranks.plan.degrees:
            ranks.degrees = ranks.plan.degrees
            self._to(ranks.all, encode(Spread(parallel=ParallelSettings(**ranks.degrees)))[0])
        job.working, job.deadline, self._model = ranks.working, None, job.request.model.model
        self._to(job.working, job.frames)

    def _to(self, ranks: Iterable[Rank], frames: Frames) -> None:
        for rank in ranks:
            self._listener.send(rank.identity, frames)  # one that is gone has rung the bell

    # The job

    def _note(self, job: Job, rank: int, event: Event, frames: Frames) -> None:
        match event:
            case Progress():
                job.last = event
                return self._pass_on(job, frames)
            case Notice():
                return self._pass_on(job, frames)
            case Result():
                job.result = frames
            case Stopped():
                latest = time.monotonic() + STOP_SECONDS
                job.stopped, job.deadline = True, min(job.deadline or latest, latest)
            case Failed():
                job.failures.append(event)
                job.deadline = time.monotonic() + GRACE_SECONDS
            case Finished():
                pass
            case _:
                return log.warning("rank %d sent a %s", rank, event.kind)
        job.through.add(rank)
        if self._ranks and len(job.through) == len(self._ranks.working):
            self._settle(job)

    def _settle(self, job: Job) -> None:
        """Answer, now that every rank is through or has been stopped."""
        if job.failures:
            if self._ranks and not are_alike(job, self._ranks.plan):
                self.stop()  # they differ now in what they have loaded
            return self._end(job.reason)
        self._end(Stopped(job=job.name) if job.stopped or job.result is None else None)

    def _end(self, event: Event | None) -> None:
        """Send the last event of the job, or the result that was held back, and be free for the next."""
        job, self.job, self._idle_since = self.job, None, time.monotonic()
        if job is None:
            return
        if job.result is not None and event is not None:
            self._discard(parse(job.result, event_from))
        frames = encode(event)[0] if event is not None else job.result or []
        if not self._answer(job.peer, frames) and event is None:
            self._discard(parse(frames, event_from))

    def _tell(self, event: Event) -> None:
        if self.job:
            self._pass_on(self.job, encode(event)[0])

    def _pass_on(self, job: Job, frames: Frames) -> None:
        if not self._answer(job.peer, frames):
            self.cancel(job.name)  # nobody waits for it any more

    def _discard(self, event: Event) -> None:
        for ref in references(event):
            if ref.segment:
                self._segments.discard(ref.segment)
