"""Names and shapes of published checkpoints, as data: no weights, and no model code to make them.

`python -m tests.record_published` writes them. A name with `{0-39}` stands for forty.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "published"
LAYOUTS = ("diffusers", "original")
"""The names of diffusers' class, and those of ComfyUI's and the authors' single files."""
Shapes = Mapping[str, tuple[int, ...]]


def read_keys(layout: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes in a layout, by checkpoint; none where it was never recorded."""
    if not (FOLDER / f"{layout}.json").is_file():
        return {}
    recorded = json.loads((FOLDER / f"{layout}.json").read_text())
    lists = {name: spread(keys) for name, keys in recorded["keys"].items()}
    return {name: lists[alike] for name, alike in recorded["checkpoints"].items()}


def write_keys(layout: str, checkpoints: Mapping[str, Shapes]) -> None:
    """Record a layout; checkpoints with the same names and shapes share one list."""
    lists: dict[str, dict[str, str]] = {}
    named = {}
    for name, shapes in checkpoints.items():
        keys = gathered(shapes)
        named[name] = next((alike for alike, others in lists.items() if others == keys), name)
        lists.setdefault(named[name], keys)
    lines = [f"{json.dumps(name)}: {json.dumps(keys, separators=(',', ':'))}" for name, keys in lists.items()]
    checkpoints_text, keys_text = json.dumps(named, indent=1), ",\n".join(lines)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{layout}.json").write_text(f'{{"checkpoints": {checkpoints_text},\n"keys": {{\n{keys_text}\n}}}}\n')


def gathered(shapes: Shapes) -> dict[str, str]:
    """Names that differ in the number of a block alone as one, with all its numbers."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name, shape in shapes.items():
        found = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        numbers.setdefault((pattern, "x".join(map(str, shape))), []).append(int(found[0]) if found else 0)
    return {pattern.replace("{}", f"{{{_ranges(listed)}}}"): shape for (pattern, shape), listed in numbers.items()}


def spread(keys: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The other way round."""
    shapes = {}
    for pattern, shape in keys.items():
        sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
        found = re.search(r"\{(.*)\}", pattern)
        for number in _numbers(found[1]) if found else [""]:
            shapes[pattern.replace(found[0], str(number)) if found else pattern] = sizes
    return shapes


def write_file(path: Path, shapes: Shapes) -> str:
    """A .safetensors file of these names, shapes and the right size, of which the weights are a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return str(path)


def _ranges(numbers: list[int]) -> str:
    """Such as "0-39" or "0-3,8"."""
    runs = [[each for _, each in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _numbers(ranges: str) -> list[int]:
    ends = [[int(end) for end in each.split("-")] for each in ranges.split(",")]
    return [number for each in ends for number in range(each[0], each[-1] + 1)]
