"""The ranks of a machine hold the weights in its memory once, whatever their number and whatever was made of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from runtime.bench.offload import Size, write_model
from runtime.linear import ParallelLinear, local_part
from runtime.mesh import Mesh
from runtime.offload.host_copy import Segment, Share, share_parameters, sharing
from runtime.offload.layout import Held, Layout
from runtime.offload.pinned import PieceWeights
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import LoraSettings, MemorySettings, ModelSettings
from tests.lora_files import Draw, kohya
from tests.processes import ROOT, run_as_processes
from tests.ranks import run_as_threads

MIB = 1 << 20
SMALL = Size(width=512, feed_forward=2048, layers=8)
LARGE = Size(layers=7)
"""128 MiB, and 1 GiB."""
ONE_COPY = 1.2
WAYS = {
    "as in the file": {"dtype": "fp32"},
    "converted": {"dtype": "bf16"},
    "fp8": {"dtype": "fp32", "quant": "fp8"},
    "layerwise": {"dtype": "bf16", "memory": {"offload": "layerwise", "resident_blocks": "0", "prefetch": "0"}},
}


def settings_of(model: str, *, memory: dict[str, str] | None = None, **settings: str) -> ModelSettings:
    return ModelSettings(model=model, memory=MemorySettings(**(memory or {})), **settings)


def held_bytes(pipeline: Pipeline) -> int:
    """What one rank uses of weights, and what it looks at."""
    tensors = [each for each in pipeline.transformer.parameters() if not each.is_meta]
    for tensor in tensors:
        tensor.detach().view(-1).view(torch.uint8)[::512].sum()
    return sum(tensor.nbytes for tensor in tensors)


def proportional_bytes() -> int:
    """Of this process, of a page that N processes have one N-th."""
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) * 1024


def growth(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """By how much a rank's proportional set grows with a model, for each of the ways, after one of the same kind."""
    figures = {}
    for way, settings in json.loads((folder / "ways.json").read_text()).items():
        warm = Pipeline.load(settings_of("random:wan", **settings), mesh=mesh, progress=ignore_progress)
        before = proportional_bytes()
        pipeline = Pipeline.load(settings_of(str(folder), **settings), mesh=mesh, progress=ignore_progress)
        held = held_bytes(pipeline)
        dist.barrier()
        figures[way] = torch.tensor([proportional_bytes() - before, held])
        dist.barrier()
        del warm, pipeline
    return figures


def copies(ranks: list[dict[str, torch.Tensor]], way: str, *, whole: int) -> float:
    """How often the weights are there, of which all ranks together need `whole`."""
    grown = sum(int(figures[way][0]) for figures in ranks)
    print(f"{way}: {len(ranks)} ranks grow by {grown / MIB:.0f} MiB in all, for {whole / MIB:.0f} MiB of weights")
    return grown / whole


@pytest.mark.alone
def test_two_ranks_hold_what_they_made_once(tmp_path):
    write_model(tmp_path, SMALL)
    (tmp_path / "ways.json").write_text(json.dumps({"converted": WAYS["converted"]}))
    ranks = run_as_processes("tests.test_host_copy:growth", {"ulysses": 2}, tmp_path)
    assert copies(ranks, "converted", whole=int(ranks[0]["converted"][1])) < ONE_COPY


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{"ulysses": 4}, {"cfg": 2, "tensor": 2}], ids=str)
def test_four_ranks_hold_a_gigabyte_once(degrees, tmp_path):
    model = write_model(tmp_path, LARGE)
    (tmp_path / "ways.json").write_text(json.dumps(WAYS))
    ranks = run_as_processes("tests.test_host_copy:growth", degrees, tmp_path)
    for way in WAYS:
        held = [int(figures[way][1]) for figures in ranks]
        whole = sum(held[:2]) if "tensor" in degrees else held[0]
        if way == "layerwise":
            whole = model // 2
        assert copies(ranks, way, whole=whole) < ONE_COPY


def shared_linears(mesh: Mesh) -> torch.nn.ModuleList:
    """Four Linears, of which each rank makes two."""
    group = sharing(mesh.group("ulysses"))
    share = Share.of(["0", "1", "2", "3"], group)
    model = torch.nn.ModuleList(torch.nn.Linear(8, 4, device="meta").requires_grad_(False) for _ in range(4))
    for number, linear in enumerate(model):
        if share.has(str(number)):
            linear.to_empty(device="cpu")
            linear.weight.fill_(number)
            linear.bias.fill_(-number)
    own = [name for name, each in model.named_parameters() if not each.is_meta]
    share_parameters(model, own, group=group)
    return model


def test_what_one_rank_made_is_the_same_memory_on_every_rank():
    models = run_as_threads({"ulysses": 2}, shared_linears)
    for number in range(4):
        for model in models:
            assert bool((model[number].weight == number).all()) and bool((model[number].bias == -number).all())
        models[0][number].weight[1, 2] = 99
        assert models[1][number].weight[1, 2] == 99


def folded(mesh: Mesh, folder: Path) -> tuple[Pipeline, list[str]]:
    """A model with a LoRA folded into two of its weights."""
    pipeline = Pipeline.load(settings_of("random:wan"), mesh=mesh, progress=ignore_progress)
    pipeline.use_loras([LoraSettings(path=str(folder / "style.safetensors"), fuse=True)])
    return pipeline, [f"blocks.{block}.attn1.to_q.weight" for block in range(2)]


def test_weights_into_which_a_lora_is_folded_are_the_same_memory_on_every_rank(tmp_path):
    layers = {f"blocks.{block}.attn1.to_q": (128, 128) for block in range(2)}
    save_file(kohya(layers, Draw(1), name=lambda layer: f"transformer.{layer}"), tmp_path / "style.safetensors")
    [(alone, names)] = [folded(Mesh.single(), tmp_path)]
    ranks = [pipeline for pipeline, _ in run_as_threads({"ulysses": 2}, lambda mesh: folded(mesh, tmp_path))]
    for name in names:
        first, second = (held_weight(pipeline, name) for pipeline in ranks)
        assert torch.equal(first, held_weight(alone, name)) and torch.equal(first, second)
        with torch.inference_mode():
            first[1, 2] = 99
        assert second[1, 2] == 99


def held_weight(pipeline: Pipeline, name: str) -> torch.Tensor:
    part = local_part(pipeline.transformer, name)
    return getattr(part.module, part.leaf)


def test_ranks_that_cannot_map_each_others_memory_have_a_copy_each(monkeypatch):
    monkeypatch.setattr("runtime.offload.host_copy._is_readable", lambda pid, number: False)
    assert run_as_threads({"ulysses": 2}, lambda mesh: sharing(mesh.group("ulysses"))) == [None, None]
    settings = settings_of("random:wan", dtype="bf16")
    load = run_as_threads({"ulysses": 2}, lambda mesh: Pipeline.load(settings, mesh=mesh, progress=ignore_progress))
    first, second = (dict(pipeline.transformer.named_parameters()) for pipeline in load)
    assert all(torch.equal(first[name], second[name]) for name in first)
    first["patch_embedding.weight"].fill_(5)
    assert not torch.equal(first["patch_embedding.weight"], second["patch_embedding.weight"])


def test_the_tensors_of_a_block_lie_in_one_piece():
    model = torch.nn.Sequential(*(ParallelLinear(torch.nn.Linear(8, size).requires_grad_(False)) for size in (4, 7, 5)))
    expected = [linear.weight.clone() for linear in model]
    share_parameters(model, [f"{number}.core.weight" for number in range(3)], group=None)
    layout = Layout(Held.all_of(model))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    PieceWeights(layout).fill(buffer)
    assert all(map(torch.equal, layout.views(buffer), expected))
    with pytest.raises(RuntimeError, match="do not lie together"):
        PieceWeights(Layout(Held.all_of(model)[::-1]))


MAKER = """
import os, sys
from runtime.offload.host_copy import Segment
segment = Segment.create(1 << 20)
segment.view("uint8", [1 << 20], 0).fill_(7)
print(*segment.place, flush=True)
sys.stdin.read()
"""


def test_memory_outlives_its_maker_for_those_that_map_it_and_nobody_else():
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        place = [int(number) for number in maker.stdout.readline().split()]
        assert os.readlink(f"/proc/{place[0]}/fd/{place[1]}").startswith("/memfd:")
        segment = Segment.open(*place)
        os.kill(maker.pid, signal.SIGKILL)
    assert bool((segment.view("uint8", [1 << 20], 0) == 7).all())
    with pytest.raises(FileNotFoundError):
        Segment.open(*place)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "weights" in name]
