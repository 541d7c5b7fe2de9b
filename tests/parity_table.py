"""Every sampler with every schedule, ours and stock KSampler: `python -m tests.parity_table > docs/parity.md`.

A tiny Wan of random weights, 6 steps, cfg 4, float32, on the processor; COMFYUI_PATH names ComfyUI's folder.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from runtime.settings import SAMPLER_NAMES, SCHEDULER_NAMES
from tests.stock import ask_comfyui, comfyui_path, relative_error
from tests.test_same_picture import INPUTS, PLAIN, SIDES, Model, random_model, sample

LIMIT = 1e-4
NOTES = """\
Limit: 1e-4. The largest are those of lms, ipndm_v and deis, whose weights for the slopes of earlier steps are large and
nearly cancel, so that they enlarge the rounding of the model itself, and of dpm_adaptive, whose steps follow from
differences.

With a single step there is one schedule less: kl_optimal then divides by zero. KSampler gives NaN, or an error with the
samplers that use Brownian noise; Outrigger refuses, and says to raise the steps.
"""

Cell = tuple[str, str]
CELLS: tuple[Cell, ...] = tuple(product(SAMPLER_NAMES, SCHEDULER_NAMES))
WIDGETS = PLAIN | {"model": "random", "steps": 6, "cfg": 4.0, "latent": "empty-1-1-even"}


@dataclass(frozen=True)
class Outcome:
    """What came of a cell: the relative error, or None with what stock ComfyUI did instead of giving a picture."""

    error: float | None
    stock: str = ""
    ours: str = ""

    def __str__(self) -> str:
        return self.stock if self.error is None else f"{self.error:.0e}" if self.error else "0"


def measure(cells: Iterable[Cell], folder: Path, **changed: object) -> dict[Cell, Outcome]:
    """The outcome of each cell; `changed` are other widgets."""
    cells, model = list(cells), random_model(folder)
    cases = [WIDGETS | changed | {"sampler_name": name, "scheduler": scheduler} for name, scheduler in cells]
    for_stock = {"model": str(model.checkpoint)} | {side: f"random-{side}" for side in SIDES}
    inputs = INPUTS | {f"random-{side}": getattr(model, side) for side in SIDES}
    stock = ask_comfyui(folder, inputs=inputs, samples=[case | for_stock for case in cases])
    offset = int(stock["step_seed_offset"])
    return {cell: outcome(model, cases[number], stock, number, offset) for number, cell in enumerate(cells)}


def outcome(model: Model, case: dict, stock: dict[str, torch.Tensor], number: int, offset: int) -> Outcome:
    """Compare one cell."""
    try:
        ours, refused = sample(model, case, cpu_noise_offset=offset), ""
    except ValueError as error:
        ours, refused = None, str(error)
    if f"errors.{number}" in stock:
        return Outcome(None, stock=bytes(stock[f"errors.{number}"].tolist()).decode(), ours=refused)
    theirs = stock[f"samples.{number}"]
    if not theirs.isfinite().all():
        return Outcome(None, stock="NaN", ours=refused)
    if ours is None or not ours.isfinite().all():
        return Outcome(float("inf"), ours=refused)
    return Outcome(relative_error(ours, theirs))


def described(found: dict[Cell, Outcome]) -> str:
    """The table, as Markdown."""
    version = (comfyui_path() / "comfyui_version.py").read_text().rpartition("__version__")[2].strip(' ="\n')
    lines = [
        "# Same latent as KSampler: every sampler with every schedule",
        "",
        f"Relative error (largest difference over largest value) of our latent against that of ComfyUI {version}'s KSampler: a",
        "Wan of random weights, 6 steps, cfg 4, seed 123, float32, on the processor. 0 is the same to the last bit. Made by",
        "`python -m tests.parity_table`, with this ComfyUI as COMFYUI_PATH.",
        "",
        "| sampler | " + " | ".join(SCHEDULER_NAMES) + " |",
        "|---|" + "---|" * len(SCHEDULER_NAMES),
    ]
    for name in SAMPLER_NAMES:
        row = [found[name, scheduler] for scheduler in SCHEDULER_NAMES]
        missing = all(each.stock.endswith("does not have it") for each in row)
        lines.append(f"| {name} | " + " | ".join("not there" if missing else str(each) for each in row) + " |")
    return "\n".join([*lines, "", NOTES])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(described(measure(CELLS, Path(folder))))


if __name__ == "__main__":
    main()
