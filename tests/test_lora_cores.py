"""A LoRA is the same beside every kind of weight, whole and over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.linear import ParallelLinear
from runtime.mesh import Mesh
from runtime.pairs import Pair
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.quant import CORES
from runtime.settings import QUANT_KINDS, MemorySettings, ModelSettings
from runtime.stored import AWQ_INT4, BLOCKS, JOINED, Stored
from tests.gguf_files import random_blocks
from tests.lora_files import Draw, added, dora, kohya, write
from tests.ranks import Case, relative_error, run_as_threads, sample_request

LIMIT = 2e-6
FLIP_LIMIT = 0.1
"""Where a sum in another order rounds one 4-bit activation another way; see `test_svdquant_ranks`."""
FROM_FILES_ALONE = (AWQ_INT4, JOINED)
"""Kinds that no plain weight becomes as it is loaded."""
LAYERS = {
    "blocks.0.attn1.to_q": (128, 128), "blocks.1.attn1.to_out.0": (128, 128), "blocks.0.ffn.net.0.proj": (256, 128),
    "blocks.1.ffn.net.2": (128, 256), "condition_embedder.time_proj": (768, 128), "proj_out": (64, 128),
}  # fmt: skip
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


def load(quant: str, mesh: Mesh | None = None, *, offload: str = "none") -> Pipeline:
    memory = MemorySettings(offload=offload, resident_blocks="0" if offload != "none" else "auto")
    settings = ModelSettings(model="random:wan", quant=quant, memory=memory)
    return Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress)


def latent(pipeline: Pipeline, quant: str) -> torch.Tensor:
    return pipeline.sample(sample_request(Case(steps=2, quant=quant)), progress=ignore_progress)


@pytest.mark.parametrize("quant", QUANT_KINDS)
def test_one_rank_and_two_give_the_latent_of_full_products_beside_the_weights(quant, tmp_path, capsys):
    tensors = kohya(LAYERS, Draw(1))
    lora = write(tmp_path / "lora.safetensors", tensors, STRENGTH)
    reference = load(quant)
    plain = latent(reference, quant)
    for name in LAYERS:
        product = (STRENGTH * added(tensors, name)).float()
        reference.transformer.get_submodule(name).register_forward_hook(
            lambda module, args, output, product=product: output + args[0] @ product.T
        )
    expected = latent(reference, quant)
    assert relative_error(plain, expected) > 1e-2

    def run(mesh: Mesh, offload: str) -> float:
        pipeline = load(quant, mesh, offload=offload)
        pipeline.use_loras([lora])
        return relative_error(latent(pipeline, quant), expected)

    errors = {}
    for offload in ("none", "layerwise"):
        errors[f"one rank, offload {offload}"] = run(Mesh.single(), offload)
        for degrees in ({"ulysses": 2}, {"tensor": 2}):
            found = run_as_threads(degrees, lambda mesh, offload=offload: run(mesh, offload))
            errors[f"{degrees}, offload {offload}"] = max(found)
    with capsys.disabled():
        print(f"\n  {quant}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), end="")
    assert max(errors.values()) < (FLIP_LIMIT if quant.startswith("svdquant") else LIMIT)
    assert min(errors.values()) < LIMIT


def test_a_full_matrix_on_quantised_weights_is_refused_by_name(tmp_path):
    lora = write(tmp_path / "lora.safetensors", dora({"blocks.0.attn1.to_q": (128, 128)}, Draw(1), by_row=True))
    with pytest.raises(ValueError, match=r"blocks.0.attn1.to_q.*needs plain weights"):
        load("svdquant-int4").use_loras([lora])
