"""Run the sidecar."""

from __future__ import annotations

import argparse
import os

from ..pool import pool_limit
from ..rank_settings import VARIABLES, KeepSettings
from .flags import checked

HELP = {
    "device": "what loaded models may take of each GPU: auto, a part of what is free such as 0.5, 20GB, or 0 for the one in use",
    "host": "the same of host memory",
    "prompts": "what encoded prompts may take: 256MB, or 0 for none",
    "idle_minutes": "after so many minutes without a prompt everything is let go of; 0 is never",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to listen, when to end, and what to keep."""
    parser.add_argument(
        "--endpoint", default="", help="ipc:///path/of/socket or tcp://127.0.0.1:PORT; a private one else"
    )
    parser.add_argument("--stdin-guard", action="store_true", help="end when standard input ends")
    for field, variable in VARIABLES.items():
        flag = f"--{variable.removeprefix('OUTRIGGER_').replace('_', '-').lower()}"
        parser.add_argument(flag, dest=field, default=None, metavar="N", help=f"{HELP[field]} ({variable})")


def run(chosen: argparse.Namespace) -> int:
    """Serve until told to end."""
    from ..server import Server, run_server

    given = {field: getattr(chosen, field) for field in VARIABLES if getattr(chosen, field) is not None}
    checked(pool_limit)
    keep = checked(KeepSettings.from_environment, variables=os.environ, **given)
    return run_server(Server(chosen.endpoint, keep=keep), stdin_guard=chosen.stdin_guard)
