"""The transport is as fast as is promised, and its suite says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.bench.transport import described, measure
from runtime.folders import SHARED_MEMORY
from tests.timing import least

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no /dev/shm: tensors use frames")
ROOT = Path(__file__).resolve().parents[1]
RATES = ("memcpy_gib_s", "pool_gib_s", "pool_cold_gib_s", "frames_gib_s", "pyzmq_gib_s")


@pytest.mark.alone
def test_a_warm_pool_reaches_a_third_of_a_copy_in_memory():
    def copies():
        figures = measure(size=128 << 20, rounds=5)
        assert all(f"{figures[name]:.2f} GiB/s" in described(figures) for name in RATES)
        return figures["memcpy_gib_s"] / figures["pool_gib_s"]

    assert least(copies, enough=3.0) <= 3.0


@pytest.mark.full
def test_half_a_gigabyte_crosses_as_fast_as_is_promised():
    command = [sys.executable, "-m", "runtime", "bench", "transport", "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    figures = json.loads(printed)
    assert figures["size_bytes"] == 512 << 20
    assert figures["pool_gib_s"] >= figures["memcpy_gib_s"] / 3
    noise = 0.75
    assert figures["pool_cold_gib_s"] >= figures["pyzmq_gib_s"] * noise
    assert figures["frames_gib_s"] >= figures["pyzmq_gib_s"] * noise
