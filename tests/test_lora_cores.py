"""A LoRA is the same beside every kind of weight, whole and over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from runtime.linear import ParallelLinear, parallel_linear
from runtime.mesh import Mesh
from runtime.pairs import Pair
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.quant import CORES
from runtime.settings import QUANT_KINDS, LoraSettings, MemorySettings, ModelSettings
from runtime.stored import AWQ_INT4, BLOCKS, JOINED, Stored
from tests.gguf_files import random_blocks, write_wan
from tests.lora_files import ALPHA, Draw, added, dora, flat, kohya, loha, lokr, write
from tests.ranks import Case, relative_error, run_as_threads, sample_request

LIMIT = 2e-6
FLIP_LIMIT = 0.1
"""Where a sum in another order rounds one 4-bit activation another way; see `test_svdquant_ranks`."""
FROM_FILES_ALONE = (AWQ_INT4, JOINED)
"""Kinds that no plain weight becomes as it is loaded."""
LAYERS = (
    "blocks.0.attn1.to_q", "blocks.1.attn1.to_out.0", "blocks.0.ffn.net.0.proj", "blocks.1.ffn.net.2",
    "condition_embedder.time_proj", "proj_out",
)  # fmt: skip
STRENGTH = 0.8


def layer_of(kind: str, linear: nn.Linear, **options) -> ParallelLinear:
    """A layer that holds a plain weight as this kind, from loading on; random codes where no plain weight becomes of it."""
    layer = ParallelLinear(linear, stored=Stored(kind), **options)
    tensors = linear.state_dict()
    if kind in BLOCKS:
        tensors["weight"] = torch.from_numpy(random_blocks(linear.weight.shape, kind))
    for leaf, tensor in tensors.items():
        part = layer.local_part(leaf)
        if part is not None:
            part.place(part.cut.take(tensor))
    return layer


@pytest.mark.parametrize("mode", ["whole", "column", "row", "gather"])
@pytest.mark.parametrize("kind", [kind for kind in CORES if kind not in FROM_FILES_ALONE])
@torch.inference_mode()
def test_pairs_add_their_product_to_the_output_of_every_core_and_cut(kind, mode):
    draw = Draw(1)
    linear = nn.Linear(512, 384)
    x = draw(3, 5, 512, spread=1.0).abs()  # the unsigned kind takes no negative ones
    pairs = [Pair(draw(8, 512), draw(384, 8, spread=0.5), 1.5), Pair(draw(3, 512), draw(384, 3, spread=0.5), -1.0)]
    product = sum(pair.scale * pair.up.double() @ pair.down.double() for pair in pairs)

    def run(mesh: Mesh) -> None:
        layer = layer_of(kind, linear, mode=mode, group=mesh.group("tensor"))
        local = x.chunk(2, dim=-1)[mesh.rank] if mode == "row" else x
        without = layer(local)
        layer.put_pairs([layer.local_pair(pair) for pair in pairs], device=x.device)
        own = product.chunk(2)[mesh.rank] if mode == "column" else product
        expected = without.double() + x.double() @ own.T
        assert relative_error(without, expected) > 0.1
        assert relative_error(layer(local), expected) < 1e-6

    run_as_threads({"tensor": 2}, run)


@pytest.mark.parametrize("kind", [kind for kind in CORES if kind not in FROM_FILES_ALONE])
@torch.inference_mode()
def test_every_core_says_which_matrix_it_stands_for(kind):
    layer, x = layer_of(kind, nn.Linear(512, 384)), Draw(1)(7, 512, spread=1.0).abs()
    product = x.double() @ layer.core.matrix().double().T
    rounded = kind.startswith("svdquant")  # their activations are
    assert layer.core.matrix().dtype == torch.float32
    assert relative_error(layer.core(x, None), product) < (0.2 if rounded else 1e-6)
    if kind not in BLOCKS:
        linear = nn.Linear(512, 384)
        assert relative_error(layer_of(kind, linear).core.matrix(), linear.weight) < 0.15


GGUF = "gguf Q8_0"
KINDS = (*QUANT_KINDS, GGUF)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("gguf") / "wan-q8_0.gguf"
    write_wan(path, "Q8_0")
    return str(path)


@pytest.fixture
def load(gguf_file):
    """A model of a kind of weight, over a mesh."""

    def load(kind: str, mesh: Mesh | None = None, *, offload: str = "none") -> Pipeline:
        memory = MemorySettings(offload=offload, resident_blocks="0" if offload != "none" else "auto")
        model = {"model": gguf_file} if kind == GGUF else {"model": "random:wan", "quant": kind}
        settings = ModelSettings(**model, memory=memory)
        return Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress)

    return load


def latent(pipeline: Pipeline) -> torch.Tensor:
    return pipeline.sample(sample_request(Case(steps=2)), progress=ignore_progress)


def layers_of(pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
    return {name: tuple(pipeline.experts[0].loras._shapes[f"{name}.weight"]) for name in LAYERS}


def check_everywhere(load, kind: str, lora: LoraSettings, expected: torch.Tensor, capsys) -> None:
    """One rank and two, resident and streamed, give a latent with a file."""

    def run(mesh: Mesh, offload: str) -> float:
        pipeline = load(kind, mesh, offload=offload)
        pipeline.use_loras([lora])
        return relative_error(latent(pipeline), expected)

    errors = {}
    for offload in ("none", "layerwise"):
        errors[f"one rank, offload {offload}"] = run(Mesh.single(), offload)
        for degrees in ({"ulysses": 2}, {"tensor": 2}):
            found = run_as_threads(degrees, lambda mesh, offload=offload: run(mesh, offload))
            errors[f"{degrees}, offload {offload}"] = max(found)
    with capsys.disabled():
        print(f"\n  {kind}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), end="")
    assert max(errors.values()) < (FLIP_LIMIT if kind.startswith("svdquant") else LIMIT)


def with_products(pipeline: Pipeline, products: dict[str, torch.Tensor]) -> torch.Tensor:
    """The latent with full products beside the weights, without a line of ours; they must be seen in it."""
    plain = latent(pipeline)
    for name, matrix in products.items():
        pipeline.transformer.get_submodule(name).register_forward_hook(
            lambda module, args, output, matrix=matrix.float(): output + args[0] @ matrix.T
        )
    expected = latent(pipeline)
    assert relative_error(plain, expected) > 1e-2
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_two_give_the_latent_of_full_products_beside_the_weights(kind, load, tmp_path, capsys):
    reference = load(kind)
    tensors = kohya(layers_of(reference), Draw(1))
    lora = write(tmp_path / "lora.safetensors", tensors, STRENGTH)
    expected = with_products(reference, {name: STRENGTH * added(tensors, name) for name in LAYERS})
    check_everywhere(load, kind, lora, expected, capsys)


def differences_of(form: str, tensors: Mapping[str, torch.Tensor], layer: str, weight: torch.Tensor) -> torch.Tensor:
    """What a file of full matrices adds to a weight at strength 1, in float64."""
    role = {key.removeprefix(f"{flat(layer)}."): each.double() for key, each in tensors.items()}
    if form == "LoKr":
        return torch.kron(role["lokr_w1"], role["lokr_w2"])
    if form == "LoHa":
        return ALPHA / 32 * (role["hada_w1_a"] @ role["hada_w1_b"]) * (role["hada_w2_a"] @ role["hada_w2_b"])
    changed = weight + added(tensors, layer)
    lengths = weight.norm(dim=1, keepdim=True) if form == "DoRA by row" else changed.norm(dim=0, keepdim=True)
    return changed * role["dora_scale"] / lengths - weight


FULL = {
    "LoKr": partial(lokr, low=""), "LoHa": partial(loha, rank=32),
    "DoRA by row": partial(dora, by_row=True), "DoRA by column": partial(dora, by_row=False),
}  # fmt: skip


ALWAYS = (("svdquant-int4", "LoKr"), ("fp8", "DoRA by column"), (GGUF, "DoRA by row"), ("none", "LoHa"))


@pytest.mark.parametrize(
    ("kind", "form"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full) for case in product(KINDS, FULL)],
)
def test_full_matrices_are_added_to_weights_that_cannot_be_written_anew(kind, form, load, tmp_path, capsys):
    """Of a plain weight that is streamed, and of packed ones, the reference adds to what the weight stands for."""
    reference = load(kind)
    tensors = FULL[form](layers_of(reference), Draw(1))
    lora = write(tmp_path / "lora.safetensors", tensors, STRENGTH)
    weights = {name: parallel_linear(reference.transformer, name).core.matrix().double() for name in LAYERS}
    products = {name: STRENGTH * differences_of(form, tensors, name, weight) for name, weight in weights.items()}
    check_everywhere(load, kind, lora, with_products(reference, products), capsys)


@pytest.mark.parametrize("mode", ["whole", "column", "row", "gather"])
@pytest.mark.parametrize("kind", ["none", "fp8", "svdquant-int4", "Q4_0"])
@torch.inference_mode()
def test_a_change_is_worked_out_from_the_part_of_the_weight_that_a_rank_has(kind, mode):
    linear, x = nn.Linear(512, 384), Draw(1)(3, 512, spread=1.0)

    def run(mesh: Mesh) -> None:
        layer = layer_of(kind, linear, mode=mode, group=mesh.group("tensor"))
        local = x.chunk(2, dim=-1)[mesh.rank] if mode == "row" else x
        without, full = layer(local), layer_of(kind, linear).core.matrix().double()
        layer.change = lambda weight: (10 * weight).cos()
        own = full.chunk(2)[mesh.rank] if mode == "column" else full
        expected = without.double() + x.double() @ (10 * own).cos().T
        assert relative_error(without, expected) > 1e-5
        assert relative_error(layer(local), expected) < (
            1e-2 if kind.startswith("svdquant") and mode == "row" else 1e-6
        )

    run_as_threads({"tensor": 2}, run)


def test_taken_off_packed_and_streamed_weights_are_as_before(load, tmp_path):
    for kind, offload in (("svdquant-int4", "none"), ("none", "layerwise")):
        pipeline = load(kind, offload=offload)
        plain = latent(pipeline)
        lora = write(tmp_path / "lora.safetensors", dora(layers_of(pipeline), Draw(1), by_row=True), 0.5)
        pipeline.use_loras([lora])
        changed = latent(pipeline)
        pipeline.use_loras([lora.model_copy(update={"strength": -1.0})])
        assert relative_error(latent(pipeline), changed) > 1e-2
        pipeline.use_loras([])
        assert torch.equal(latent(pipeline), plain)
