"""Changing LoRAs on a loaded model costs next to nothing, and leaves nothing behind."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.families.wan import TINY
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import LoraSettings, ModelSettings, SampleSettings
from tests.lora_files import Draw, dora, kohya, pairs

CONFIG = {**TINY, "attention_head_dim": 128, "ffn_dim": 2048}
"""512 wide: where a matrix takes longer than Python, as on a model of real size."""
RANK = 64


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Pipeline:
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        diffusers.WanTransformer3DModel(**CONFIG).save_pretrained(folder)
    settings = ModelSettings(model=str(folder), dtype="fp32")
    return Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)


@pytest.fixture(scope="module")
def files(pipeline, tmp_path_factory) -> list[Path]:
    """Four of rank 64 for every Linear of the blocks, and a DoRA."""
    folder, shapes = tmp_path_factory.mktemp("loras"), pipeline.experts[0].loras._shapes
    layers = {
        name.removesuffix(".weight"): tuple(shape)
        for name, shape in shapes.items()
        if name.startswith("blocks") and len(shape) == 2
    }
    assert len(layers) == 20
    names = {"down": ".lora_A.weight", "up": ".lora_B.weight", "name": lambda layer: f"transformer.{layer}"}
    tensors = [pairs(layers, Draw(seed), rank=RANK, **names) for seed in range(4)]
    paths = [folder / f"{number}.safetensors" for number in range(5)]
    for path, each in zip(paths, [*tensors, dora(dict(list(layers.items())[:1]), Draw(9), by_row=True)], strict=True):
        save_file(each, path)
    return paths


def chosen(files: list[Path], *strengths: float) -> list[LoraSettings]:
    return [LoraSettings(path=str(file), strength=s) for file, s in zip(files, strengths, strict=False)]


def step_seconds(pipeline: Pipeline) -> float:
    """Processor time of a step with 1024 tokens: it does not grow while other processes run."""
    request = Sample(
        job="step",
        model=ModelSettings(model="random:wan"),
        settings=SampleSettings(steps=2, cfg=1.0),
        positive=(Conditioning(embedding=torch.zeros(1, 64, 4096)),),
        latent=torch.zeros(1, 16, 1, 64, 64),
    )
    began = time.process_time()
    pipeline.sample(request, progress=ignore_progress)
    return (time.process_time() - began) / 2


def swap_seconds(pipeline: Pipeline, loras: list[LoraSettings]) -> float:
    began = time.process_time()
    pipeline.use_loras(loras)
    return time.process_time() - began


@pytest.mark.alone
def test_swapping_four_loras_of_rank_64_takes_under_a_hundredth_of_a_step(pipeline, files, capsys):
    step = statistics.median(step_seconds(pipeline) for _ in range(3))
    pipeline.use_loras(chosen(files, 1.0, 1.0, 1.0, 1.0))
    kinds = {
        "another strength": [swap_seconds(pipeline, chosen(files, 1.0 + n / 100, 0.5, -1.0, 0.2)) for n in range(21)],
        "one off or on": [
            swap_seconds(pipeline, chosen(files, 0.0 if n % 2 else 1.0, 0.5, -1.0, 0.2)) for n in range(21)
        ],
        "all off or on": [swap_seconds(pipeline, chosen(files, *[float(n % 2)] * 4)) for n in range(21)],
    }
    with capsys.disabled():
        for kind, seconds in kinds.items():
            share = statistics.median(seconds) / step
            print(f"\n  {kind}: {1000 * statistics.median(seconds):.2f} ms, {share:.2%} of a step", end="")
    assert all(statistics.median(seconds) < 0.01 * step for seconds in kinds.values())


def test_what_a_lora_takes_counts_as_held(tmp_path):
    pipeline = Pipeline.load(ModelSettings(model="random:wan"), mesh=Mesh.single(), progress=ignore_progress)
    save_file(
        kohya({"blocks.0.attn1.to_q": (128, 128)}, Draw(1), name="transformer.{}".format), tmp_path / "s.safetensors"
    )
    before, pair, weight = pipeline.held.host, 4 * 2 * 4 * 128, 4 * 128 * 128
    for fuse, held in ((False, 2 * pair), (True, 2 * pair + weight)):  # what was read, and what lies beside the weight
        pipeline.use_loras([LoraSettings(path=str(tmp_path / "s.safetensors"), fuse=fuse)])
        assert pipeline.held.host - before == held
    pipeline.use_loras([])
    assert pipeline.held.host - before == 2 * pair  # for when it is put on again


def held_bytes() -> int:
    """Of all the tensors there are, each storage once."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and each.layout == torch.strided
    }
    return sum(storages.values())


def test_a_hundred_swaps_hold_no_more_than_two(pipeline, files):
    stacks = [chosen(files, 1.0, 0.5, -1.0, 0.2, 0.7), chosen(files[:2], -0.3, 1.0), [], chosen(files[4:], 1.3)]
    after = []
    for number in range(100):
        pipeline.use_loras(stacks[number % len(stacks)])
        if number % 20 == 19:
            after.append(held_bytes())
    assert len(after) == 5 and len(set(after)) == 1, after
