"""Say what this machine has, what is missing, and what to do."""

from __future__ import annotations

import argparse

from ..diagnosis import described, examine
from .output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to print it."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(chosen: argparse.Namespace) -> int:
    """Look at the machine; exit status 1 where something is missing without which nothing runs."""
    found = examine()
    show(found, described, as_json=chosen.json)
    return 0 if found["ok"] else 1
