"""Measure, all sides in one run."""

from __future__ import annotations

import argparse
from importlib import import_module

from .output import show

SUITES = {
    "transport": "how fast a large tensor comes from a rank to a node",
    "loop": "what the loop around the model takes, beside ComfyUI's",
    "parallel": "what each parallel kind gains on two ranks",
    "load": "a file of 4 GB onto two ranks: seconds and memory",
    "offload": "a model of 2.5 GB from its file under a limit of 1 GiB",
    "quant": "what 4 bits cost: errors, pictures and bytes",
}
"""Modules of `runtime.bench`, each with `measure() -> dict`, what `--json` prints, and `described(figures) -> str`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure."""
    parser.add_argument("suite", choices=SUITES, help="; ".join(f"{name}: {what}" for name, what in SUITES.items()))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(chosen: argparse.Namespace) -> int:
    """Run a suite, and print its figures."""
    suite = import_module(f"..bench.{chosen.suite}", __package__)
    figures = suite.measure()
    show(figures, suite.described, as_json=chosen.json)
    return 0
