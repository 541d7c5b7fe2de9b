"""Layerwise offload: the latent is that of the resident model, on one rank and on several."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from runtime.agreement import agree
from runtime.blocks import BlockRunner
from runtime.checkpoint import random_tensors
from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.linear import ParallelLinear
from runtime.mesh import Mesh
from runtime.offload.gathered import GatheredWeights
from runtime.offload.layout import Held, Layout
from runtime.offload.parts import MemoryPart
from runtime.offload.weights import BlockWeights, ReadWeights
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.reading import WeightFile
from runtime.settings import MemorySettings, ModelSettings, amount_of
from tests.ranks import (
    Case,
    family_case,
    relative_error,
    run_as_threads,
    run_case,
    run_cases_as_processes,
    run_on_one,
    sample_request,
)

SAME = 2e-6
FAMILY_NAMES = ("wan", "flux")
WAYS = {
    "layerwise, prefetch 1": {"offload": "layerwise", "resident_blocks": "0"},
    "layerwise, prefetch 0.25": {"offload": "layerwise", "resident_blocks": "0", "prefetch": "0.25"},
    "layerwise, 2 resident": {"offload": "layerwise", "resident_blocks": "2"},
    "from disk": {"offload": "disk", "resident_blocks": "0", "prefetch": "2"},
}
DEGREES = ({"ulysses": 2}, {"tensor": 2}, {"cfg": 2, "ulysses": 2})
LAYERS = {"num_layers": 3}
"""One more than `TINY` has, so that there are more blocks than slots."""


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def case(request, tmp_path_factory):
    """A small request to a model with random weights in a file."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    config = {**family.tiny, **LAYERS}
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    save_file(dict(random_tensors(shapes)), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": family.transformer_class, **config}))
    latent = (1, 16, 1, 6, 8) if family.latent.dims == 3 else (1, 16, 6, 8)
    return Case(model=str(folder), family=request.param, latent=latent, steps=2)


@pytest.fixture(scope="module")
def resident(case):
    return run_on_one([case])[0]


def load(case, way, **settings):
    memory = MemorySettings(**WAYS[way])
    return Pipeline.load(
        ModelSettings(model=case.model, memory=memory, **settings), mesh=Mesh.single(), progress=ignore_progress
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_streamed_model_gives_the_latent_of_the_resident_one(case, resident, way):
    pipeline = load(case, way)
    twice = [pipeline.sample(sample_request(case), progress=ignore_progress) for _ in range(2)]
    assert all(torch.equal(latent, resident) for latent in twice)


@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
def test_packed_weights_are_streamed_as_they_are(case, resident, quant):
    packed = run_on_one([replace(case, quant=quant)])[0]
    assert relative_error(packed, resident) > 1e-3
    pipeline = load(case, "layerwise, prefetch 1", quant=quant)
    assert torch.equal(pipeline.sample(sample_request(case), progress=ignore_progress), packed)


def test_weights_that_are_converted_as_they_are_loaded_are_in_no_file_and_none_is_read(case, monkeypatch):
    monkeypatch.setattr("runtime.pipeline.fill_transformer", None)
    with pytest.raises(ValueError, match="choose offload layerwise"):
        load(case, "from disk", quant="svdquant-int4")


def test_a_file_of_the_wrong_shape_is_refused_before_it_is_read(case, tmp_path):
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(f"{case.model}/{path.name}")
    name = next(name for name in weights if "blocks.1" in name and weights[name].ndim == 2)
    save_file(weights | {name: weights[name][:-1].clone()}, path)
    (tmp_path / "config.json").write_text(Path(case.model, "config.json").read_text())
    with pytest.raises(ValueError, match=re.escape(name)):
        load(replace(case, model=str(tmp_path)), "from disk")


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("way", ["layerwise, prefetch 1", "from disk"])
def test_a_streamed_model_over_ranks_gives_the_latent_of_one(case, resident, degrees, way):
    spread = replace(case, degrees=degrees, memory=WAYS[way])
    latents = run_as_threads(degrees, lambda mesh: run_case(spread, mesh, {}))
    assert max(relative_error(latent, resident) for latent in latents) < SAME


@pytest.mark.full
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_processes_stream_as_threads_do(case, resident, degrees, tmp_path):
    cases = [replace(case, degrees=degrees, memory=way) for way in WAYS.values()]
    for latents in run_cases_as_processes(cases, tmp_path):
        assert max(relative_error(latent, resident) for latent in latents) < SAME


class Steps:
    """A model of a few blocks, each an addition and a product, and what its weights read."""

    def __init__(self, count: int, *, prefetch: int) -> None:
        self.blocks = [ParallelLinear(torch.nn.Linear(4, 4).requires_grad_(False)) for _ in range(count)]
        self.filled: list[int] = []
        weights = {}
        for number, block in enumerate(self.blocks):
            layout = Layout(Held.all_of(block))
            stored = ReadWeights(layout, [MemoryPart(each.tensor.detach()) for each in layout.held])
            weights[block] = Counted(stored, number, self.filled)
        self.expected = [
            (block.core.weight.clone(), block.bias.clone()) for block in self.blocks
        ]  # before the runner takes them
        self.runner = BlockRunner(weights, prefetch=prefetch, device=torch.device("cpu"))

    def run(self, *numbers: int) -> bool:
        """Whether each block computes what it should, in this order."""
        x = torch.randn(2, 4)
        return all(torch.equal(self.blocks[n](x), torch.nn.functional.linear(x, *self.expected[n])) for n in numbers)


class Counted(BlockWeights):
    """Weights that note when they are filled in."""

    def __init__(self, weights, number, filled):
        super().__init__(weights.layout)
        self._weights, self._number, self._filled = weights, number, filled

    def fill(self, buffer, start=0):
        self._filled.append(self._number)
        self._weights.fill(buffer)


def test_blocks_are_fetched_ahead_once_each_and_the_first_again_after_the_last():
    model = Steps(5, prefetch=2)
    assert model.run(*range(5), *range(5))
    model.runner._filler._thread.shutdown(wait=True)
    assert model.filled[:10] == [*range(5), *range(5)]


def test_no_more_slots_than_those_on_their_way_and_the_one_that_runs():
    model = Steps(5, prefetch=2)
    model.run(*range(5))
    assert model.runner.slot_bytes == 3 * model.runner._weights[0].layout.nbytes


@pytest.mark.parametrize("order", [(0, 3, 4, 1), (2, 2, 2), (4, 3, 2, 1, 0), (0, 4)])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_any_order_of_blocks_computes_with_the_right_weights(order, prefetch):
    assert Steps(5, prefetch=prefetch).run(*order, *order)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_nothing_is_fetched_for_blocks_that_a_cache_skips(prefetch):
    """As a cache does that decides by the first block whether the others run: a stand-in, over four steps."""
    model = Steps(5, prefetch=prefetch)
    first, *others = model.blocks
    model.runner.expect([first])
    for computes in (True, False, False, True):
        assert model.run(0)
        model.runner.expect([*others, first] if computes else [first])
        assert model.run(*range(1, 5)) if computes else True
    model.runner._filler._thread.shutdown(wait=True)
    step, skipped = [0, 1, 2, 3, 4], [0]
    ahead = [0] if prefetch else []
    assert model.filled == [*step, *skipped, *skipped, *step, *ahead]


def test_a_block_fetched_ahead_in_vain_makes_room_for_those_that_run():
    model = Steps(5, prefetch=2)
    assert model.run(0)
    model.runner.expect([model.blocks[3], model.blocks[4]])
    assert model.run(3, 4)
    model.runner._filler._thread.shutdown(wait=True)
    assert model.filled == [0, 1, 2, 3, 4]


def test_a_block_that_fails_gives_its_slot_back():
    model = Steps(3, prefetch=1)
    for _ in range(4):
        with pytest.raises(RuntimeError):
            model.blocks[1](torch.randn(2, 7))
    assert model.run(0, 1, 2)


def test_what_was_fetched_ahead_for_a_run_that_has_ended_is_fetched_anew():
    model = Steps(3, prefetch=1)
    assert model.run(0, 1, 2)
    model.runner.forget()
    assert model.run(0, 1, 2)
    model.runner.forget()
    model.runner._filler._thread.shutdown(wait=True)
    assert model.filled == [0, 1, 2, 0] * 2


def test_weights_that_cannot_be_read_fail_the_block_that_needs_them():
    model = Steps(3, prefetch=1)

    def fill(buffer):
        raise OSError("the file is gone")

    model.runner._weights[2].fill = fill
    assert model.run(0, 1)
    with pytest.raises(Refused, match="cannot be read from their file: the file is gone"):
        model.run(2)


def ending_with(mesh):
    """A progress at which all ranks end with what one of them met."""

    def progress(stage, step, total, *, failure=None, **others):
        agree(mesh, stop=False, failure=failure)

    return progress


def test_weights_that_one_rank_cannot_read_end_the_step_on_all_and_the_next_prompt_is_right(case, resident):
    """From real files, of which rank 1 alone is refused a block; nothing is loaded again."""
    settings = ModelSettings(model=case.model, memory=MemorySettings(**WAYS["from disk"]))
    request = sample_request(case)

    def run(mesh):
        pipeline = Pipeline.load(settings, mesh=mesh, progress=ending_with(mesh))
        weights = pipeline.experts[0].runner._weights[1]
        fill = weights.fill
        if mesh.rank == 1:
            weights.fill = refuse
        with pytest.raises(Refused, match="cannot be read from their file: the file is gone"):
            pipeline.sample(request, progress=ending_with(mesh))
        weights.fill = fill
        return pipeline.sample(request, progress=ending_with(mesh))

    def refuse(buffer, start=0):
        raise OSError("the file is gone")

    for latent in run_as_threads({"ulysses": 2}, run):
        assert relative_error(latent, resident) < SAME


def test_a_rank_that_cannot_read_its_part_of_a_block_keeps_no_other_waiting_for_it():
    def run(mesh):
        layout = Layout(Held.all_of(ParallelLinear(torch.nn.Linear(8, 8))))
        tensors = [torch.randn(each.shape) for each in layout.held]
        weights = ReadWeights(layout, [MemoryPart(tensor) for tensor in tensors])
        if mesh.rank == 1:
            weights.fill = None
        gathered = GatheredWeights(weights, mesh.group("ulysses"))
        with pytest.raises(TypeError) if mesh.rank == 1 else nullcontext():
            gathered.fill(torch.zeros(gathered.buffer_bytes, dtype=torch.uint8))
        return mesh.least(1)

    assert run_as_threads({"ulysses": 2}, run) == [1, 1]


def test_a_tensor_that_one_rank_cannot_load_is_refused_by_all(case, monkeypatch):
    read = WeightFile.part

    def part(file, name, *others, **options):
        if "blocks.1." in name and dist.get_rank() == 1:
            raise OSError("the disk is gone")
        return read(file, name, *others, **options)

    monkeypatch.setattr(WeightFile, "part", part)

    def run(mesh):
        with pytest.raises(Refused, match="cannot be read: the disk is gone"):
            Pipeline.load(ModelSettings(model=case.model), mesh=mesh, progress=ending_with(mesh))
        return mesh.least(1)

    assert run_as_threads({"ulysses": 2}, run) == [1, 1]


@pytest.mark.parametrize("prefetch", [1, 2])
def test_weights_that_can_be_read_again_are_read_again(prefetch):
    model = Steps(4, prefetch=prefetch)
    there = {number: model.runner._weights[number].fill for number in range(4)}

    def fill(buffer):
        raise OSError("the file is gone")

    for number in range(4):
        model.runner._weights[number].fill = fill
    with pytest.raises(Refused, match="the file is gone"):
        model.run(0)
    model.runner._filler._thread.submit(int).result()  # what was fetched ahead has failed as well
    for number in range(4):
        model.runner._weights[number].fill = there[number]
    assert model.run(*range(4), *range(4))


@pytest.mark.parametrize(
    ("text", "total", "amount"),
    [("0", 5, 0), ("2", 5, 2), ("9", 5, 5), ("0.25", 8, 2), ("0.25", 2, 1), ("1.0", 7, 7), ("0.14", 50, 7)],
)
def test_a_count_or_a_part(text, total, amount):
    assert amount_of(text, total) == amount


@pytest.mark.parametrize("text", ["", "-1", "1.5", "half", "nan", "1e3", "0.1234567", "auto", "10000"])
def test_no_other_amount_is_taken(text):
    with pytest.raises(ValueError, match="prefetch"):
        MemorySettings(offload="layerwise", prefetch=text)


def test_amounts_without_offload_are_refused():
    with pytest.raises(ValueError, match="choose one of those"):
        MemorySettings(prefetch="2")


def test_random_weights_are_in_no_file():
    settings = ModelSettings(model="random:wan", memory=MemorySettings(offload="disk"))
    with pytest.raises(ValueError, match="choose offload layerwise"):
        Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)


@pytest.mark.parametrize("quant", ["none", "fp8"])
def test_compiled_blocks_are_streamed_as_well(quant):
    """The weights come and go outside of what is compiled, which is no more than where they stay."""
    case = family_case("flux", steps=2)
    whole, streamed = (
        ModelSettings(model=case.model, quant=quant, memory=memory)
        for memory in (MemorySettings(), MemorySettings(offload="layerwise", resident_blocks="0"))
    )
    (reference, graphs), (latent, graphs_streamed) = (compiled_sample(each, case) for each in (whole, streamed))
    assert relative_error(latent, reference) < SAME and graphs_streamed == graphs > 0


def compiled_sample(settings: ModelSettings, case: Case) -> tuple[torch.Tensor, int]:
    """The latent, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    [expert] = pipeline.experts
    for block in (*expert.transformer.transformer_blocks, *expert.transformer.single_transformer_blocks):
        block.compile(backend="eager")
    latent = pipeline.sample(sample_request(case), progress=ignore_progress)
    return latent, torch._dynamo.utils.counters["stats"]["unique_graphs"]
