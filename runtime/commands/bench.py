"""Measure, all sides in one run."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

SUITES = ("transport", "loop", "parallel", "offload", "quant")
"""Modules of `runtime.bench`, each with `measure() -> dict`, what `--json` prints, and `described(figures) -> str`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure."""
    parser.add_argument("suite", choices=SUITES, help="what to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(chosen: argparse.Namespace) -> int:
    """Run a suite, and print its figures."""
    suite = import_module(f"..bench.{chosen.suite}", __package__)
    figures = suite.measure()
    print(json.dumps(figures) if chosen.json else suite.described(figures))
    return 0
