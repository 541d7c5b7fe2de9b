"""The shapes of each family's `TINY`, recorded for `plan`, which imports no torch: `python -m tests.record_tiny` writes them."""

from __future__ import annotations

import json

from runtime.checkpoint import build_transformer
from runtime.families import FAMILIES
from runtime.inspection import RECORDED, inspect_model


def shapes_of(family: str) -> dict[str, list[int]]:
    """What the family's class has."""
    return {name: list(shape) for name, shape in build_transformer(inspect_model(f"random:{family}"))[1].items()}


def main() -> None:
    """Write a file for each family."""
    RECORDED.mkdir(exist_ok=True)
    for family in FAMILIES:
        lines = ",\n".join(f"{json.dumps(name)}: {shape}" for name, shape in shapes_of(family).items())
        (RECORDED / f"{family}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
