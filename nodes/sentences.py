"""Pydantic's errors in the user's words."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


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
            return f"{name} {value!r} is not available in Outrigger; choose one of: {context['expected']}"
        case "less_than_equal":
            return f"{name} is {value}: set it to {context['le']} or less"
        case "greater_than_equal":
            return f"{name} is {value}: set it to {context['ge']} or more"
        case "string_too_long":
            return f"{name} has {len(value)} characters: shorten it to {context['max_length']} or less"
        case "string_unicode":
            return f"{name} has a character that is half of a pair: delete it and type it again"
        case _:
            return f"{name} is {reprlib.repr(value)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
