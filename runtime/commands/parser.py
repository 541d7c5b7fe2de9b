"""The parser of the command line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from types import ModuleType


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the nearest flag or command that there is."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """End with the message and what was probably meant."""
        words = [word.strip("'\",()").split("=")[0] for word in message.split()]
        known = [*self._option_string_actions, *(choice for a in self._actions for choice in a.choices or ())]
        unknown = [word for word in words if word.startswith("--")] or words
        near = [match for word in unknown if word not in known for match in difflib.get_close_matches(word, known, n=1)]
        super().error(f"{message} (did you mean {near[0]}?)" if near else message)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def] # argparse's own signature
        """Parse; what is left over is an error here, where the flags of this command are known."""
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return namespace, left


def parser_of(commands: Mapping[str, ModuleType]) -> Parser:
    """The parser of these commands; what it parses has `run`, the chosen one's."""
    parser = Parser(prog="python -m runtime", description="Outrigger's sidecar and its tools.", allow_abbrev=False)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, command in commands.items():
        does = (command.__doc__ or "").splitlines()[0]
        subparser = subparsers.add_parser(name, help=does, description=does, allow_abbrev=False)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser
