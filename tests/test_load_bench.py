"""`bench load`, on a model of a few MiB."""

from __future__ import annotations

from runtime.bench.load import RANKS, described, measure
from tests.test_offload_bench import SMALL


def test_a_file_is_loaded_onto_two_ranks_on_both_plans():
    figures = measure(size=SMALL, rounds=1, held=0.5)
    assert {"file_bytes", "seconds", "sequential_read_seconds", "peak_bytes"} < figures.keys()
    assert figures["seconds"] == max(plan["seconds"] for plan in figures["plans"].values()) > 0
    assert figures["base_bytes"] < figures["peak_bytes"] < figures["base_bytes"] + (1 << 30) * RANKS
    assert "onto 2 ranks" in described(figures)
