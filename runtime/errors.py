"""What can go wrong, by name.

`ValueError` is for what the user can put right: its text says what happened, with which values, and what to do.
The classes here are for what the user cannot put right by changing a widget, and for a cancelled job.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


class Refused(ValueError):
    """A setting, plan or file that cannot be run; the text names the values and the way out."""


class ProtocolError(Exception):
    """Bytes that are not a message of ours: wrong version, unknown field, size or dtype that does not add up.

    `job` is the job that the message names, as far as it could be read.
    """

    def __init__(self, message: str, *, job: str = "") -> None:
        self.job = job
        super().__init__(message)


class SidecarError(RuntimeError):
    """A failure inside the sidecar.

    `rank` is None when the failure is not one rank's. `remote_traceback` is the text of the traceback in the process
    where it happened, or empty. `out_of_memory` marks what more memory, or a smaller job, would have avoided.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: str = "",
        step: int | None = None,
        remote_traceback: str = "",
        out_of_memory: bool = False,
    ) -> None:
        self.out_of_memory = out_of_memory
        self.rank, self.stage, self.step, self.remote_traceback = rank, stage, step, remote_traceback
        super().__init__(f"{message}\n\n{remote_traceback}".rstrip() if remote_traceback else message)


class Cancelled(BaseException):
    """The job was cancelled by the user. Not an `Exception`, so that no handler of errors swallows it."""


def shown(value: Any) -> str:
    """A value as an error shows it: short, and in one line."""
    return " ".join(reprlib.repr(value).split())


def in_our_words(make: Callable[..., Value], **widgets: Any) -> Value:
    """A settings object of these widget values. Raises `ValueError` with one sentence per value that does not fit."""
    try:
        return make(**widgets)
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        raise ValueError("; ".join(_sentence(detail) for detail in error.errors())) from None


def _sentence(detail: dict[str, Any]) -> str:
    context, value = detail.get("ctx", {}), detail.get("input")
    name = ".".join(str(part) for part in detail["loc"])
    match detail["type"]:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            return f"{name} {shown(value)} is not available in Outrigger; choose one of: {context['expected']}"
        case "less_than_equal":
            return f"{name} is {shown(value)}: set it to {context['le']} or less"
        case "greater_than_equal":
            return f"{name} is {shown(value)}: set it to {context['ge']} or more"
        case "string_too_long":
            return f"{name} has {len(value)} characters: shorten it to {context['max_length']} or less"
        case "string_unicode":
            return f"{name} has a character that is half of a pair: delete it and type it again"
        case _:
            return f"{name} is {shown(value)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
