"""Flags from a file: YAML or JSON, by name."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Refused

CONFIG = "--config"
MAX_CONFIG_BYTES = 1 << 20

Actions = Mapping[str, argparse.Action]
"""What a command's parser does with each flag."""


def words_of_config(words: Sequence[str], actions: Actions) -> list[str]:
    """The flags of the file that a command line names, as one types them; none of those that the line gives itself.

    Raises `Refused` when the file is not a table of these flags.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(CONFIG)
    try:
        path = finder.parse_known_args(list(words))[0].config
    except argparse.ArgumentError as error:
        raise Refused(str(error)) from None
    if path is None:
        return []
    given = {word.partition("=")[0] for word in words}
    flags = {key: _words(path, key, value, actions) for key, value in read_config(Path(path)).items()}
    return [word for key, typed in flags.items() if f"--{key}" not in given for word in typed]


def read_config(path: Path) -> dict[str, Any]:
    """The keys and values of a file; a dash and an underscore are the same. Raises `Refused` when it is something else."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)  # a pipe or a device has no size to ask for
        if len(content) > MAX_CONFIG_BYTES:
            raise Refused(f"{path} has more than {MAX_CONFIG_BYTES} bytes: that is no file of flags")
        content = _parsed(path, content.decode())
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is no text in UTF-8: name a file of flags") from error
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise Refused(f"{path} is no table of flags, such as model: tiny-shapes, and ulysses: 2 in the next line")
    return {str(key).replace("_", "-"): value for key, value in content.items()}


def _parsed(path: Path, text: str) -> Any:
    import yaml  # not before it is needed, so that the other commands start at once

    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error


def _words(path: str, key: str, value: Any, actions: Actions) -> list[str]:
    """A key of a file as one types it."""
    known = {flag.removeprefix("--"): action for flag, action in actions.items() if flag not in (CONFIG, "--help")}
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        raise Refused(f"{path}: unknown key {key!r}{f' (did you mean {near[0]}?)' if near else ''}")
    if isinstance(value, bool) and known[key].nargs == 0:
        return [f"--{key}"] if value else []
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise Refused(f"{path}: {key} is {value!r}: give a text or a number")
    if len(values) > 1 and not isinstance(known[key], argparse._AppendAction):
        raise Refused(f"{path}: {key} is a list of {len(values)}: give one")
    return [f"--{key}={each}" for each in values]
