"""`bench offload`, on a model of a few MiB."""

from __future__ import annotations

from runtime.bench import offload
from runtime.bench.offload import Size, described, measure

SMALL = Size(width=256, feed_forward=512, layers=4, latent=(1, 16, 1, 8, 8))
FIELDS = {"resident_step_seconds", "offload_step_seconds", "peak_rss_bytes", "limit_bytes", "model_bytes"}


def test_a_model_runs_from_its_file_under_a_limit():
    figures = measure(size=SMALL, rounds=2)
    assert figures.keys() > FIELDS
    assert figures["model_bytes"] > 4 * SMALL.layers * (8 * 256**2 + 2 * 256 * 512)
    assert figures["offload_step_seconds"] > 0 and figures["base_rss_bytes"] < figures["peak_rss_bytes"]
    assert "from its file" in described(figures)
    assert figures["tokens"] == 16 and 0 < figures["block_read_seconds"] < figures["offload_step_seconds"]


def test_so_many_tokens_are_chosen_that_a_block_takes_longer_to_compute_than_to_read(monkeypatch):
    monkeypatch.setattr(offload, "_computing_seconds", lambda size: size.tokens / 1000)
    assert offload._fitting(Size(), 0.01).tokens == 64
    assert offload._fitting(Size(), 0.1).tokens == 576
    assert offload._fitting(Size(), 9.0).tokens == 2304
