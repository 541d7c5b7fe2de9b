"""`bench offload`, on a model of a few MiB."""

from __future__ import annotations

from runtime.bench.offload import Size, described, measure

SMALL = Size(width=256, feed_forward=512, layers=4, latent=(1, 16, 1, 8, 8))
FIELDS = {"resident_step_seconds", "offload_step_seconds", "peak_rss_bytes", "limit_bytes", "model_bytes"}


def test_a_model_runs_from_its_file_under_a_limit():
    figures = measure(size=SMALL, rounds=2)
    assert figures.keys() > FIELDS
    assert figures["model_bytes"] > 4 * SMALL.layers * (8 * 256**2 + 2 * 256 * 512)
    assert figures["offload_step_seconds"] > 0 and figures["base_rss_bytes"] < figures["peak_rss_bytes"]
    assert "from its file" in described(figures)
