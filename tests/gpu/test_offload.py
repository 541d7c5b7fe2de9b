"""Layerwise offload on CUDA: weights come in while blocks compute, and memory stays within what was planned.

`tests/gpu/run` runs this; without a GPU every test is skipped with the reason.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from runtime.bench.offload import Size, request_of, write_model
from runtime.footprint import bytes_per_rank
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.release import release_memory
from runtime.settings import MemorySettings, ModelSettings
from tests.ranks import Case, relative_error, run_case, run_cases_as_processes

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device: torch sees none"),
]

SIZE = Size(layers=12, latent=(1, 16, 1, 256, 256))
"""16384 tokens: 2.9 TFLOP a block, which copies 75 MB in bf16. That takes longer to compute where the GPU does fewer than
38000 operations for a byte of its link: 900 TFLOPS at 24 GB/s do 37500.
"""
LAYERWISE = {"offload": "layerwise", "resident_blocks": "0"}
OVERLAPPED, NEAR = 0.8, 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SIZE)
    return folder


def load(folder: Path, **memory: str) -> Pipeline:
    settings = ModelSettings(model=str(folder), dtype="bf16", memory=MemorySettings(**memory))
    return Pipeline.load(settings, mesh=Mesh.single("cuda:0"), progress=ignore_progress)


def sample(pipeline: Pipeline, *, steps: int) -> torch.Tensor:
    return pipeline.sample(request_of(ModelSettings(model="bench"), SIZE, steps=steps), progress=ignore_progress)


def spans(events: list[dict], *, copies: bool) -> list[tuple[float, float]]:
    """When the GPU copied from the host, or computed, in microseconds; one after the other."""
    names = ("gpu_memcpy",) if copies else ("kernel",)
    chosen = [event for event in events if event.get("cat") in names and (not copies or "HtoD" in event["name"])]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in chosen)


def shared_time(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How much of `some` lies within `others`."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in some for begin, stop in others)


def test_weights_are_copied_while_blocks_compute(folder, tmp_path):
    pipeline = load(folder, **LAYERWISE)
    sample(pipeline, steps=1)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as timeline:
        sample(pipeline, steps=2)
        torch.cuda.synchronize()
    timeline.export_chrome_trace(str(tmp_path / "timeline.json"))
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    copied = [span for span in spans(events, copies=True) if span[1] - span[0] > 100]
    assert len(copied) >= 2 * SIZE.layers
    share = shared_time(copied, spans(events, copies=False)) / sum(end - start for start, end in copied)
    print(f"of the time of copying, {share:.3f} lies within that of computing")
    assert share > OVERLAPPED


@pytest.mark.parametrize("prefetch", ["0", "1", "0.25"])
@pytest.mark.parametrize("offload", ["layerwise", "disk"])
def test_memory_stays_within_what_was_planned(offload, prefetch, folder):
    memory = {"offload": offload, "resident_blocks": "2", "prefetch": prefetch}
    planned = bytes_per_rank(inspect_model(str(folder)), dtype="bf16", tensor=1, offload=MemorySettings(**memory))
    before = torch.cuda.memory_allocated()
    pipeline = load(folder, **memory)
    held = torch.cuda.memory_allocated() - before
    print(f"{held / 2**20:.0f} MiB of weights and slots, planned {planned / 2**20:.0f}")
    assert abs(held / planned - 1) < NEAR
    torch.cuda.reset_peak_memory_stats()
    sample(pipeline, steps=2)
    streamed = torch.cuda.max_memory_allocated() - before - held
    del pipeline
    release_memory()  # the hooks of a streamed model refer to each other
    resident = load(folder)
    held_resident = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    sample(resident, steps=2)
    activations = torch.cuda.max_memory_allocated() - before - held_resident
    print(f"beside them {streamed / 2**20:.0f} MiB, resident {activations / 2**20:.0f} MiB")
    assert streamed < activations + 64 * 2**20


@pytest.mark.parametrize("memory", [LAYERWISE, {**LAYERWISE, "offload": "disk"}], ids=lambda memory: memory["offload"])
def test_a_streamed_model_gives_the_latent_of_the_resident_one(memory, folder):
    resident = sample(load(folder), steps=2)
    assert torch.equal(sample(load(folder, **memory), steps=2), resident)


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices: torch sees {GPUS}")
@pytest.mark.parametrize("fetch", ["own", "gather", "auto"])
def test_ranks_that_share_a_picture_give_the_latent_of_one(fetch, tmp_path):
    case = Case(dtype="fp32", degrees={"ulysses": 2}, memory={**LAYERWISE, "fetch": fetch})
    reference = run_case(replace(case, degrees={}, memory={}), Mesh.single("cuda:0"), {})
    [latents] = run_cases_as_processes([case], tmp_path, kind="cuda")
    assert all(relative_error(latent, reference) < 1e-4 for latent in latents)
