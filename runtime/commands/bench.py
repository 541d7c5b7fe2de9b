"""Measure, all sides in one run."""

from __future__ import annotations

import argparse
from importlib import import_module

from .output import show

SUITES = ("transport", "loop", "parallel", "load", "offload", "quant")
"""Modules of `runtime.bench`, each with `measure() -> dict`, what `--json` prints, and `described(figures) -> str`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure."""
    parser.add_argument("suite", choices=SUITES, help="what to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(chosen: argparse.Namespace) -> int:
    """Run a suite, and print its figures."""
    suite = import_module(f"..bench.{chosen.suite}", __package__)
    figures = suite.measure()
    show(figures, suite.described, as_json=chosen.json)
    return 0
