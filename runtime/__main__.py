"""The command line: `python -m runtime COMMAND`."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import sys
from collections.abc import Sequence

from .errors import Refused


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    chosen = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return chosen.run(chosen)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(prog="python -m runtime", description="Outrigger's sidecar and its tools.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    _add_serve(commands)
    _add_bench(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction) -> None:
    serve = commands.add_parser("serve", help="run the sidecar", allow_abbrev=False)
    serve.add_argument(
        "--endpoint", default="", help="ipc:///path/of/socket or tcp://127.0.0.1:PORT; a private one else"
    )
    serve.add_argument("--stdin-guard", action="store_true", help="end when standard input ends")
    serve.set_defaults(run=_serve)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="measure, all sides in one run", allow_abbrev=False)
    bench.add_argument("suite", choices=("transport", "loop"), help="what to measure")
    bench.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    bench.set_defaults(run=_bench)


def _serve(chosen: argparse.Namespace) -> int:
    from .server import Server, run_server

    return run_server(Server(chosen.endpoint), stdin_guard=chosen.stdin_guard)


def _bench(chosen: argparse.Namespace) -> int:
    if chosen.suite == "transport":
        from .bench import transport as suite
    else:
        from .bench import loop as suite
    figures = suite.measure()
    print(json.dumps(figures) if chosen.json else suite.described(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
