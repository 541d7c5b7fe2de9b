"""The parser of the command line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping
from types import ModuleType

from ..errors import Refused
from .config import CONFIG, words_of_config


class Parser(argparse.ArgumentParser):
    """An argument parser that also takes flags from the file of `--config`, and whose errors name the nearest flag or
    command that there is.
    """

    def error(self, message: str) -> None:  # type: ignore[override]
        """End with the message and what was probably meant."""
        choice = re.search(r"invalid choice: '([^']*)'", message)
        words = (
            [choice[1]] if choice else [re.split("[=:]", word)[0] for word in message.split() if word.startswith("--")]
        )
        known = [*self._option_string_actions, *(choice for a in self._actions for choice in a.choices or ())]
        near = [match for word in words for match in difflib.get_close_matches(word, known, n=1) if word not in known]
        super().error(f"{message} (did you mean {near[0]}?)" if near else message)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def] # argparse's own signature
        """Parse; what is left over is an error here, where the flags of this command are known."""
        words = list(sys.argv[1:] if args is None else args)
        if CONFIG in self._option_string_actions:
            try:
                words = [*words_of_config(words, self._option_string_actions), *words]
            except Refused as error:
                super().error(str(error))
        namespace, left = super().parse_known_args(words, namespace)
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
