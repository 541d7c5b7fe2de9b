"""Suites of `python -m runtime bench SUITE`. Each has `measure() -> dict`, what `--json` prints, and `described(figures) -> str`."""
