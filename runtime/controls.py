"""Requests about the sidecar itself: stop a job, tell how it is, let go of what is loaded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .chosen_part import PartKind
from .message import Message
from .settings import ModelSettings, ParallelSettings

Job = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]


class Cancel(Message):
    """Stop a job at its next step boundary. The job answers with `Stopped` (or its result, if that was quicker)."""

    kind: Literal["cancel"] = "cancel"
    job: Job


class Status(Message):
    """Ask how the sidecar is, and what a job that needs a `model`, and a part of it, would still take; answered by `Report` at
    once, also while a job runs.
    """

    kind: Literal["status"] = "status"
    model: ModelSettings | None = None
    part: PartKind | None = None


class Free(Message):
    """Let go of everything that is loaded, unless a job runs; answered by `Report`."""

    kind: Literal["free"] = "free"


class Spread(Message):
    """From here on the ranks stand in a mesh of these degrees, or each of them alone; the server says so before the first job
    that needs it.
    """

    kind: Literal["spread"] = "spread"
    parallel: ParallelSettings


class Keep(Message):
    """Of what a rank has loaded these are kept: the first rank, without which none of it can be used, has no others. For ranks
    that the job does not run on.
    """

    kind: Literal["keep"] = "keep"
    models: tuple[ModelSettings, ...] = ()


class Shutdown(Message):
    """End the sidecar and its ranks."""

    kind: Literal["shutdown"] = "shutdown"
