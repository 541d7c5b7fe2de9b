"""Run the sidecar."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to listen, and when to end."""
    parser.add_argument(
        "--endpoint", default="", help="ipc:///path/of/socket or tcp://127.0.0.1:PORT; a private one else"
    )
    parser.add_argument("--stdin-guard", action="store_true", help="end when standard input ends")


def run(chosen: argparse.Namespace) -> int:
    """Serve until told to end."""
    from ..server import Server, run_server

    return run_server(Server(chosen.endpoint), stdin_guard=chosen.stdin_guard)
