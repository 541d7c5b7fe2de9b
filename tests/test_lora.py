"""LoRAs are put on, weighed, taken off and cut over ranks exactly, and what cannot be applied is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.checkpoint import build_transformer
from runtime.errors import Refused
from runtime.inspection import inspect_model
from runtime.linear import ParallelLinear
from runtime.lora.changes import Kronecker
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import LoraSettings, MemorySettings, ModelSettings
from tests.lora_files import Draw, added, dora, dotted, kohya, loha, lokr, peft, weights_of, write
from tests.ranks import Case, relative_error, run_as_threads, sample_request

LIMIT = 2e-6
SHAPES = {name: tuple(shape) for name, shape in build_transformer(inspect_model("random:wan"))[1].items()}
LINEARS = [
    *(f"blocks.{n}.{layer}" for n in range(2) for layer in ("attn1.to_q", "attn1.to_v", "attn1.to_out.0", "attn2.to_k")),
    *(f"blocks.{n}.ffn.{layer}" for n in range(2) for layer in ("net.0.proj", "net.2")),
    *(f"condition_embedder.{layer}" for layer in ("time_proj", "text_embedder.linear_1", "text_embedder.linear_2")),
    "proj_out",
]  # fmt: skip
"""Of each kind of cut over ranks, by diffusers' names."""
LAYERS = {layer: SHAPES[f"{layer}.weight"] for layer in LINEARS}
NAMED = {layer: shape for layer, shape in LAYERS.items() if "text_embedder" not in layer}


def load(mesh: Mesh | None = None, **settings) -> Pipeline:
    return Pipeline.load(
        ModelSettings(model="random:wan", **settings), mesh=mesh or Mesh.single(), progress=ignore_progress
    )


def latent(pipeline: Pipeline) -> torch.Tensor:
    return pipeline.sample(sample_request(Case(steps=2)), progress=ignore_progress)


def pairs_of(pipeline: Pipeline) -> int:
    return sum(len(module.pairs) for module in pipeline.transformer.modules() if isinstance(module, ParallelLinear))


@pytest.fixture(scope="module")
def loras(tmp_path_factory) -> dict[str, LoraSettings]:
    folder = tmp_path_factory.mktemp("loras")
    tensors = {
        "kohya": kohya(LAYERS, Draw(1)),
        "peft": peft(LAYERS, Draw(2), name=lambda layer: f"transformer.{layer}"),
        "dora by row": dora(NAMED, Draw(3), by_row=True),
        "dora by column": dora(NAMED, Draw(3), by_row=False),
        "loha": loha(NAMED, Draw(4), rank=2),
        "lokr": lokr(NAMED, Draw(5), low=""),
        "norms": {f"transformer.blocks.0.attn1.{n}.diff": Draw(6)(128) for n in ("norm_q", "norm_k")}
        | {f"transformer.{layer}.diff_b": Draw(7)(shape[0]) for layer, shape in LAYERS.items()},
    }
    return {
        name: write(folder / f"{name.replace(' ', '_')}.safetensors", each, strength)
        for (name, each), strength in zip(tensors.items(), (0.7, -1.0, 0.8, 1.2, 0.5, 0.9, 1.0), strict=True)
    }


STACKS = [["kohya", "peft"], ["dora by row"], ["dora by column", "kohya"], ["loha", "lokr"], ["norms", "kohya"]]


# On several ranks ---------------------------------------------------------------------------------------------------


def test_a_lora_is_its_product_added_to_the_weight(tmp_path):
    """The reference is a model whose weights have the product in them; no code of ours made it."""
    tensors, strength = kohya(LAYERS, Draw(1)), -0.7
    pipeline, reference = load(), load()
    for layer in LAYERS:
        weight = reference.transformer.get_parameter(f"{layer}.weight")
        weight.data = (weight.double() + strength * added(tensors, layer)).float()
    plain = latent(pipeline)
    [report] = pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors, strength)])
    error, moved = relative_error(latent(pipeline), latent(reference)), relative_error(plain, latent(reference))
    print(f"{error:.1e}, moved by {moved:.2f}")
    assert error < LIMIT and moved > 0.05
    assert report == f"lora.safetensors: {len(LAYERS)} targets applied"


@pytest.mark.parametrize("stack", STACKS, ids=str)
@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"tensor": 2}, {"tensor": 2, "ulysses": 2}], ids=str)
def test_every_rank_has_the_latent_of_one(degrees, stack, loras):
    chosen = [loras[name] for name in stack]
    alone = load()
    plain = latent(alone)
    alone.use_loras(chosen)
    expected = latent(alone)
    assert relative_error(plain, expected) > 1e-3

    def run(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        pipeline = load(mesh)
        pipeline.use_loras(chosen)
        changed = latent(pipeline)
        pipeline.use_loras([])
        return changed, latent(pipeline)

    for changed, back in run_as_threads(degrees, run):
        assert relative_error(changed, expected) < LIMIT
        assert relative_error(back, plain) < LIMIT


def test_a_lora_sends_nothing_between_ranks(loras, monkeypatch):
    sent = []
    reduce = dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, **options: (sent.append(tensor.nbytes), reduce(tensor, **options))
    )

    def run(mesh: Mesh) -> int:
        pipeline = load(mesh)
        sent.clear()
        latent(pipeline)
        dist.barrier()
        without = sum(sent)
        dist.barrier()
        pipeline.use_loras([loras["kohya"], loras["peft"]])
        sent.clear()
        dist.barrier()
        latent(pipeline)
        dist.barrier()
        return sum(sent) - without

    assert run_as_threads({"tensor": 2}, run) == [0, 0]


# Putting on and taking off ------------------------------------------------------------------------------------------


def test_taking_off_leaves_the_model_as_it_was_bit_for_bit(loras):
    pipeline = load(dtype="bf16")
    before = {name: weight.clone() for name, weight in weights_of(pipeline).items()}
    for stack in STACKS:
        pipeline.use_loras([loras[name] for name in stack])
    pipeline.use_loras([])
    after = weights_of(pipeline)
    assert pairs_of(pipeline) == 0 and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


@pytest.mark.parametrize("degrees", [{}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_a_streamed_model_has_the_latent_of_a_resident_one(degrees, loras):
    pair = (loras["kohya"], loras["norms"])
    streamed = MemorySettings(offload="layerwise", resident_blocks="1", prefetch="0")

    def run(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        pipeline = load(mesh, memory=streamed)
        plain = latent(pipeline)
        pipeline.use_loras(pair)
        return plain, latent(pipeline)

    wanted = latent(load()), latent(load(loras=pair))
    for found in run_as_threads(degrees, run) if degrees else [run(Mesh.single())]:
        assert max(map(relative_error, found, wanted)) < 2e-6


def test_low_rank_changes_touch_no_weight(loras):
    pipeline = load()
    before = {name: weight.data_ptr() for name, weight in weights_of(pipeline).items()}
    pipeline.use_loras([loras["kohya"], loras["peft"], loras["loha"]])
    assert {name: weight.data_ptr() for name, weight in weights_of(pipeline).items()} == before
    assert pairs_of(pipeline) == 2 * len(LAYERS) + len(NAMED)


@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}], ids=str)
def test_fused_it_is_the_same_without_a_pair_and_comes_off_again(degrees, loras):
    chosen = [loras["kohya"], loras["lokr"], loras["peft"]]
    fused = [lora.model_copy(update={"fuse": True}) for lora in chosen]

    def run(mesh: Mesh) -> None:
        pipeline = load(mesh)
        plain = latent(pipeline)
        pipeline.use_loras(chosen)
        expected = latent(pipeline)
        assert pairs_of(pipeline) > len(LAYERS)
        pipeline.use_loras(fused)
        assert pairs_of(pipeline) == 0
        assert relative_error(latent(pipeline), expected) < LIMIT
        pipeline.use_loras(fused[:1])
        pipeline.use_loras([])
        assert torch.equal(latent(pipeline), plain)

    run_as_threads(degrees, run) if degrees else run(Mesh.single())


def test_strength_0_is_off_and_reads_nothing(tmp_path):
    pipeline = load()
    assert pipeline.use_loras([LoraSettings(path=str(tmp_path / "gone.safetensors"), strength=0.0)]) == ()


def test_loading_with_loras_is_loading_and_putting_them_on(loras):
    pipeline = load()
    pipeline.use_loras((loras["kohya"], loras["norms"]))
    assert torch.equal(latent(load(loras=(loras["kohya"], loras["norms"]))), latent(pipeline))


def test_a_refused_lora_leaves_those_that_are_on(loras, tmp_path):
    pipeline = load()
    pipeline.use_loras([loras["kohya"]])
    before = latent(pipeline)
    with pytest.raises(Refused, match="no such LoRA"):
        pipeline.use_loras([loras["peft"], LoraSettings(path=str(tmp_path / "gone.safetensors"))])
    assert torch.equal(latent(pipeline), before)


# What is told and refused -------------------------------------------------------------------------------------------

ONE = {"blocks.0.attn1.to_q": (128, 128)}


def refusal(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> str:
    with pytest.raises(Refused) as caught:
        load().use_loras([write(tmp_path / "lora.safetensors", tensors)])
    return str(caught.value)


def test_keys_that_were_not_applied_are_told_by_name(tmp_path):
    tensors = kohya(ONE, Draw(1)) | {
        "diffusion_model.blocks.0.diff_m": torch.zeros(3),
        "diffusion_model.blocks.1.diff_m": torch.zeros(3),
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.zeros(4, 8),
        "text_encoder.layers.0.fc1.lora_A.weight": torch.zeros(4, 8),
        "diffusion_model.blocks.9.self_attn.q.lora_A.weight": torch.zeros(4, 128),
        "something": torch.zeros(1),
    }
    [report] = load().use_loras([write(tmp_path / "lora.safetensors", tensors)])
    assert report == (
        "lora.safetensors: 1 target applied; left to Outrigger Text Encode: "
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight, text_encoder.layers.0.fc1.lora_A.weight; "
        "not applied: diffusion_model.blocks.*.diff_m (2), diffusion_model.blocks.9.self_attn.q.lora_A.weight, something"
    )


def test_an_alpha_of_0_adds_nothing_and_is_told_of(tmp_path):
    tensors = kohya({**ONE, "blocks.1.attn1.to_q": (128, 128)}, Draw(1))
    tensors["lora_unet_blocks_1_attn1_to_q.alpha"] = torch.tensor(0.0)
    pipeline = load()
    [report] = pipeline.use_loras([write(tmp_path / "lora.safetensors", tensors)])
    assert report == (
        "lora.safetensors: 2 targets applied; 1 of them by nothing, since their alpha is 0: blocks.1.attn1.to_q.weight"
    )


def test_what_only_scales_and_the_biases_of_pairs_are_told_of(tmp_path):
    unread = {
        "diffusion_model.blocks.0.attn1.to_q.lora_B.bias": torch.zeros(128),
        "lora_unet_blocks_1_self_attn_k.alpha": torch.tensor(3.0),
        "lora_unet_blocks_1_self_attn_v.dora_scale": torch.ones(128, 1),
    }
    [report] = load().use_loras([write(tmp_path / "lora.safetensors", peft(ONE, Draw(1)) | unread)])
    assert report == f"lora.safetensors: 1 target applied; not applied: {', '.join(unread)}"


@pytest.mark.parametrize("memory", [{"offload": "layerwise", "resident_blocks": "0"}, {}], ids=str)
def test_a_report_says_which_were_not_fused(memory, tmp_path):
    lora = write(tmp_path / "lora.safetensors", kohya(LAYERS, Draw(1))).model_copy(update={"fuse": True})
    pipeline = load(memory=MemorySettings(**memory))
    [report] = pipeline.use_loras([lora])
    told = f"{pairs_of(pipeline)} of them not fused but kept beside their weights, which are quantised or offloaded"
    assert pairs_of(pipeline) == (12 if memory else 0)
    assert report == f"lora.safetensors: {len(LAYERS)} targets applied" + (f"; {told}" if memory else "")
    [report] = pipeline.use_loras([lora.model_copy(update={"fuse": False})])
    assert "fused" not in report


def test_layouts_may_stand_beside_each_other_in_a_file(tmp_path):
    parts = [
        kohya(ONE, Draw(1)),
        peft({"blocks.1.attn1.to_q": (128, 128)}, Draw(2)),
        loha({"blocks.1.attn2.to_q": (128, 128)}, Draw(3), rank=2),
    ]
    together, apart = load(), load()
    together.use_loras([write(tmp_path / "all.safetensors", parts[0] | parts[1] | parts[2])])
    apart.use_loras([write(tmp_path / f"{number}.safetensors", each) for number, each in enumerate(parts)])
    assert torch.equal(latent(together), latent(apart))


def test_of_two_adapters_in_a_file_the_second_is_told_of(tmp_path):
    first, second = (peft(ONE, Draw(seed), adapter=f".{name}") for seed, name in ((1, "a"), (2, "b")))
    pipeline = load()
    [report] = pipeline.use_loras([write(tmp_path / "lora.safetensors", first | second)])
    assert report.endswith("1 target applied; not applied: " + ", ".join(sorted(second)))
    [pair] = pipeline.transformer.blocks[0].attn1.to_q.pairs
    assert torch.equal(pair.down, first["diffusion_model.blocks.0.attn1.to_q.lora_A.a.weight"])


@pytest.mark.parametrize(
    ("layers", "family"),
    [
        ({"transformer_blocks.0.attn.add_q_proj": (8, 8), "single_transformer_blocks.7.proj_mlp": (8, 8)}, "Flux"),
        ({"double_blocks.0.img_attn.qkv": (8, 8), "single_blocks.0.linear1": (8, 8)}, "Flux"),
        ({"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (8, 8)}, "SDXL"),
        ({"joint_blocks.0.x_block.attn.qkv": (8, 8)}, "Stable Diffusion 3"),
    ],
)
@pytest.mark.parametrize("name", [dotted, lambda layer: "lora_unet_" + layer.replace(".", "_")])
def test_a_lora_of_another_family_says_which(layers, family, name, tmp_path):
    text = refusal(tmp_path, kohya(layers, Draw(1), name=name))
    assert family in text and "Wan" in text and next(iter(layers)).split(".")[-1] in text


@pytest.mark.parametrize(
    ("family", "says"), [("zimage", "Z-Image"), ("sd3", "Stable Diffusion 3"), ("flux2", "Flux"), ("qwen", "Qwen")]
)
def test_a_lora_of_every_other_architecture_says_which(family, says, tmp_path):
    shapes = build_transformer(inspect_model(f"random:{family}"))[1]
    weights = {name.removesuffix(".weight"): tuple(shape) for name, shape in shapes.items() if len(shape) == 2}
    layers = {name: shape for name, shape in weights.items() if "blocks." in name or "layers." in name}
    text = refusal(tmp_path, kohya(layers, Draw(1), name=dotted))
    assert "changes nothing of Wan" in text and f"it looks like a LoRA for {says}" in text


def test_a_lora_for_another_size_names_both_shapes(tmp_path):
    text = refusal(tmp_path, kohya({"blocks.0.attn1.to_q": (64, 128)}, Draw(1)))
    assert "(64, 128)" in text and "(128, 128)" in text and "attn1.to_q" in text and "looks like" not in text


def parts(*, up, down, dora=None):
    """A pair of one layer, of any shapes."""
    shapes = {"lora_up.weight": up, "lora_down.weight": down} | ({} if dora is None else {"dora_scale": dora})
    return {f"lora_unet_blocks_0_self_attn_q.{role}": torch.zeros(shape) for role, shape in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": torch.zeros(2)}, "not a LoRA"),
        ({"lora_unet_blocks_0_self_attn_q.lora_up.weight": torch.zeros(128, 4)}, "down missing"),
        ({"lora_unet_blocks_0_self_attn_q.oft_blocks": torch.zeros(4, 2, 2)}, "OFT"),
        ({"diffusion_model.patch_embedding.reshape_weight": torch.zeros(2)}, "more input channels"),
        ({"lora_unet_blocks_0_self_attn_q.hada_w1_a": torch.zeros(128, 4), "lora_unet_blocks_0_self_attn_q.hada_t1": torch.zeros(4, 4)}, "Tucker"),
        (
            {
                "lora_unet_blocks_0_self_attn_q.lora_up.weight": torch.zeros(128, 4),
                "lora_unet_blocks_0_self_attn_q.lora_down.weight": torch.zeros(3, 128),
            },
            "no low-rank pair",
        ),
        (parts(up=(128, 0), down=(0, 128)), r"down has shape (0, 128), which is no matrix"),
        (parts(up=(), down=()), "down has shape (), which is no matrix"),
        (parts(up=(128, 4), down=(4, 128), dora=(7, 1)), "7 trained lengths are neither those of 128 rows nor of 128 columns"),
        (parts(up=(128, 4), down=(4, 128), dora=(1, 129)), "129 trained lengths"),
        (parts(up=(128, 4), down=(4, 128), dora=(0, 1)), "0 trained lengths"),
        (parts(up=(128, 4), down=(4, 128), dora=()), "1 trained lengths"),
        ({"lora_unet_blocks_0_self_attn_q.lokr_w1": torch.zeros(128), "lora_unet_blocks_0_self_attn_q.lokr_w2": torch.zeros(128)}, "lokr_w1 has shape (128,)"),
        (kohya(ONE, Draw(1)) | kohya({"blocks.0.self_attn.q": (128, 128)}, Draw(2)), "two changes"),
        (kohya(ONE, Draw(1)) | {"lora_unet_blocks_0_attn1_to_q.lora_up.weight": torch.full((128, 4), float("nan"))}, "up has numbers that are not finite"),
        (kohya(ONE, Draw(1)) | {"lora_unet_blocks_0_attn1_to_q.alpha": torch.tensor(float("inf"))}, "alpha has numbers that are not finite"),
        (kohya(ONE, Draw(1)) | {"lora_unet_blocks_0_attn1_to_q.lora_up.weight": torch.ones(128, 4, dtype=torch.int32)}, "lora_up.weight is I32), and weights"),
        (kohya(ONE, Draw(1)) | {"lora_unet_blocks_0_attn1_to_q.alpha": torch.ones(2)}, "damaged at lora_unet_blocks_0_attn1_to_q"),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_is_refused_by_name(tensors, words, tmp_path):
    assert words in refusal(tmp_path, tensors)


def test_a_kronecker_product_may_have_the_kernel_of_a_convolution_behind():
    draw = Draw(1)
    first, second = draw(4, 2), draw(3, 5, 1, 2, 2)
    change = Kronecker(first, second, 2.0)
    expected = 2.0 * torch.kron(first[..., None, None, None], second).flatten(1)
    assert change.shape == expected.shape and torch.equal(change.added(torch.device("cpu")), expected)


def test_only_safetensors_files_are_read(tmp_path):
    (tmp_path / "lora.pt").write_bytes(b"x")
    with pytest.raises(Refused, match="convert"):
        load().use_loras([LoraSettings(path=str(tmp_path / "lora.pt"))])
