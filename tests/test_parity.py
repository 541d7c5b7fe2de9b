"""Samplers and schedules of KSampler over a Wan model: the cells of `parity_table`, within its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity_table import CELLS, LIMIT, Cell, measure

pytestmark = pytest.mark.comfy

SOME = CELLS[::8]
"""Each sampler once or twice, with another schedule than the one before."""


def check(cells: list[Cell], folder: Path, **changed: object) -> None:
    """Every cell that this ComfyUI has is within the limit, and gives a picture."""
    found = {
        cell: each for cell, each in measure(cells, folder, **changed).items() if not each.stock.endswith("not have it")
    }
    assert {name for name, _ in found} >= {name for name, _ in cells} - {"exp_heun_2_x0", "exp_heun_2_x0_sde"}
    worst = max(found, key=lambda cell: found[cell].error or 0.0)
    print(f"{len(found)} cells, worst {found[worst]} at {worst}")
    assert not {cell: each for cell, each in found.items() if each.error is None or not each.error <= LIMIT}


def test_latents_are_ksamplers(tmp_path):
    check(SOME, tmp_path, steps=3)


@pytest.mark.full
def test_latents_are_ksamplers_in_every_cell(tmp_path):
    check(CELLS, tmp_path)


@pytest.mark.full
def test_latents_are_ksamplers_with_part_of_the_noise(tmp_path):
    check(CELLS[::5], tmp_path, denoise=0.7, latent="picture")
    check(CELLS[1::5], tmp_path, denoise=0.3, latent="picture")
