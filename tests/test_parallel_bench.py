"""The suite `bench parallel` runs all its sides, and counts what they send."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.bench.parallel import RATIOS, described, measure
from runtime.bench.parallel_sides import SIDES, Size

ROOT = Path(__file__).resolve().parents[1]
SMALL = Size(
    heads=4,
    head_dim=32,
    double_blocks=1,
    single_blocks=2,
    rows=8,
    columns=10,
    text=14,
    text_width=64,
    pooled_width=32,
)
FIELDS = {"cases", "ratios", "bytes_per_step", "bytes_minimum", "rss_ratio_tensor2"}


def test_every_side_runs_and_ours_send_no_more_than_they_must():
    figures = measure(size=SMALL, rounds=1)
    assert figures.keys() >= FIELDS
    assert [(case["name"], case["ranks"]) for case in figures["cases"]] == [(side.name, side.ranks) for side in SIDES]
    assert figures["ratios"].keys() == RATIOS.keys() and min(figures["ratios"].values()) > 0
    assert set(figures["bytes_per_step"]) == {"ulysses2", "ring2", "tensor2", "cfg2"}
    assert figures["bytes_per_step"] == figures["bytes_minimum"]
    assert json.loads(json.dumps(figures)) == figures
    assert all(case["name"] in described(figures) for case in figures["cases"])


@pytest.mark.full
def test_two_ranks_are_as_fast_and_as_small_as_is_promised():
    """On two quiet cores, in about eight minutes."""
    command = [sys.executable, "-m", "runtime", "bench", "parallel", "--json"]
    figures = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    ratios = figures["ratios"]
    assert min(ratios[kind] for kind in ("ulysses2", "ring2", "tensor2")) >= 1.88
    assert ratios["cfg2"] >= 1.93
    assert ratios["one_rank_vs_diffusers"] >= 0.98
    assert min(ratios["ulysses2_vs_diffusers"], ratios["ring2_vs_diffusers"]) >= 1.0
    assert figures["rss_ratio_tensor2"] <= 0.56
