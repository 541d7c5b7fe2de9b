"""Files of GGUF: their weights stay packed, mean what the package `gguf` says, and give one latent on every plan."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import Refused
from runtime.facts import Source
from runtime.footprint import bytes_per_rank
from runtime.gguf_header import read_gguf
from runtime.inspection import inspect_model
from runtime.machine import Machine
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.plan import PlanRefused, make_plan
from runtime.progress import ignore_progress
from runtime.protocol import Sample
from runtime.quant.gguf import GGUFCore
from runtime.quant.gguf_blocks import dequantise
from runtime.reading import opener
from runtime.settings import LoraSettings, MemorySettings, ModelSettings, ParallelSettings
from runtime.stored import BLOCKS
from tests.gguf_files import random_blocks, write_tensors, write_wan
from tests.ranks import Case, relative_error, run_as_threads, sample_request

PLANS = [{"tensor": 2}, {"cfg": 2, "ulysses": 2}, {"ring": 2, "tensor": 2}]
QUANTISED = "blocks.0.ffn.net.0.proj.core"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tuple[Path, dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        kind: (folder / f"wan-{kind}.gguf", write_wan(folder / f"wan-{kind}.gguf", kind)) for kind in ("Q8_0", "Q4_K")
    }


def load(model: Path | str, mesh: Mesh | None = None, **settings) -> Pipeline:
    settings = ModelSettings(model=str(model), **settings)
    return Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress)


def sample(model: Path | str, mesh: Mesh | None = None, **settings) -> torch.Tensor:
    return load(model, mesh, **settings).sample(request(), progress=ignore_progress)


def request() -> Sample:
    return sample_request(Case(latent=(1, 16, 1, 8, 10), prompts=(6, 4), cfg=3.0, steps=2))


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_the_package_bit_for_bit(kind):
    packed = random_blocks((7, 3 * 256), kind)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    ours = dequantise(torch.from_numpy(packed), kind)
    assert (BLOCKS[kind].elements, BLOCKS[kind].nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert ours.dtype == torch.float32 and np.array_equal(ours.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_gives_plain_tensors_whole_rows_and_shapes_from_before(tmp_path, mapped):
    numbers = np.random.default_rng(1).standard_normal((4, 6, 1, 2, 16)).astype(np.float32)
    half, narrow = numbers.astype(np.float16), gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.BF16)
    blocks = random_blocks((8, 64), "Q5_0")
    path = write_tensors(
        tmp_path / "some.gguf",
        {
            "flat": (numbers.reshape(4, -1), "F32"), "half": (half.reshape(4, 192), "F16"),
            "narrow": (narrow, "BF16"), "wide": (blocks, "Q5_0"), "packed": (blocks, "Q5_0"), "odd": (blocks, "Q5_0"),
        },
        **{"comfy.gguf.orig_shape.flat": [4, 6, 1, 2, 16], "comfy.gguf.orig_shape.odd": [16, 2, 16]},
    )  # fmt: skip
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q5_0))
    with opener(Source(path, {}, packed=frozenset(["packed"])), mapped=mapped)(path) as file:
        assert torch.equal(file.get_tensor("flat"), torch.from_numpy(numbers))
        assert torch.equal(file.get_tensor("half"), torch.from_numpy(half.reshape(4, 192)))
        assert torch.equal(file.get_tensor("narrow"), torch.from_numpy(numbers).to(torch.bfloat16))
        assert torch.equal(file.get_tensor("wide"), expected)
        assert torch.equal(file.get_tensor("odd"), expected.view(16, 2, 16))
        packed = file.get_slice("packed")
        assert packed.get_shape() == [8, 44] and torch.equal(packed[2:5, 22:], torch.from_numpy(blocks)[2:5, 22:])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_weights_stay_packed_and_stand_for_the_packages_numbers(files, kind):
    path, numbers = files[kind]
    model = load(path)._predict._model
    core = model.get_submodule(QUANTISED)
    assert type(core) is GGUFCore and core.weight.dtype == torch.uint8
    assert torch.equal(dequantise(core.weight, kind), torch.from_numpy(numbers["blocks.0.ffn.0.weight"]))
    assert torch.equal(model.patch_embedding.weight, torch.from_numpy(numbers["patch_embedding.weight"]))
    cores = [module for module in model.modules() if type(module) is GGUFCore]
    assert len(cores) == 2 * 10 + 1  # the Linears of both blocks, and the modulation of time


@pytest.mark.parametrize("kind", ["IQ4_XS", "IQ3_S"])
def test_formats_of_codebooks_and_grids_give_the_latent_of_their_numbers(kind, tmp_path):
    numbers = write_wan(tmp_path / "coded.gguf", kind)
    save_file({name: torch.from_numpy(array.copy()) for name, array in numbers.items()}, tmp_path / "plain.safetensors")
    coded = sample(tmp_path / "coded.gguf")
    assert relative_error(coded, sample(tmp_path / "plain.safetensors")) < 1e-6
    for result in run_as_threads({"tensor": 2}, lambda mesh: sample(tmp_path / "coded.gguf", mesh)):
        assert relative_error(result, coded) < 2e-6


def test_without_the_package_the_formats_of_its_tables_are_refused_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.gguf_header.find_spec", lambda name: None)
    path = write_tensors(tmp_path / "some.gguf", {"a": (random_blocks((2, 256), "IQ4_NL"), "IQ4_NL")})
    assert read_gguf(path)["a"].dtype == "IQ4_NL"
    path = write_tensors(tmp_path / "some.gguf", {"a": (random_blocks((2, 256), "IQ2_S"), "IQ2_S")})
    with pytest.raises(Refused, match=r"'a' is IQ2_S, whose tables are in the package gguf: install it"):
        read_gguf(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_every_plan_and_offload_gives_the_latent_of_the_numbers(files, kind, tmp_path):
    path, numbers = files[kind]
    save_file({name: torch.from_numpy(array.copy()) for name, array in numbers.items()}, tmp_path / "plain.safetensors")
    plain, alone = sample(tmp_path / "plain.safetensors"), sample(path)
    assert relative_error(alone, plain) < 1e-6
    for degrees in PLANS:
        for result in run_as_threads(degrees, lambda mesh: sample(path, mesh)):
            assert relative_error(result, alone) < 2e-6, degrees
    for offload in ("layerwise", "disk"):
        memory = MemorySettings(offload=offload, resident_blocks="0")
        assert torch.equal(sample(path, memory=memory), alone), offload
    [cut, _] = run_as_threads({"tensor": 2}, lambda mesh: sample(path, mesh, memory=MemorySettings(offload="disk")))
    assert relative_error(cut, alone) < 2e-6


def test_a_lora_counts_as_on_the_numbers(files, tmp_path):
    path, numbers = files["Q8_0"]
    save_file({name: torch.from_numpy(array.copy()) for name, array in numbers.items()}, tmp_path / "plain.safetensors")
    generator = torch.Generator().manual_seed(5)
    pair = {"lora_A": torch.randn(4, 512, generator=generator), "lora_B": torch.randn(1024, 4, generator=generator)}
    keys = {f"diffusion_model.blocks.1.ffn.0.{leaf}.weight": tensor * 0.1 for leaf, tensor in pair.items()}
    save_file(keys, tmp_path / "lora.safetensors")
    loras = (LoraSettings(path=str(tmp_path / "lora.safetensors")),)
    changed = sample(path, loras=loras)
    assert relative_error(changed, sample(tmp_path / "plain.safetensors", loras=loras)) < 1e-6
    assert relative_error(changed, sample(path)) > 1e-3


def test_names_may_have_comfyuis_prefix_and_memory_is_that_of_the_blocks(files, tmp_path):
    write_wan(tmp_path / "prefixed.gguf", "Q5_1", prefix="model.diffusion_model.", plain="F16")
    facts = inspect_model(str(tmp_path / "prefixed.gguf"))
    assert (facts.family, facts.layers, facts.stored["blocks.0.attn1.to_q"].kind) == ("wan", 2, "Q5_1")
    assert torch.isfinite(sample(tmp_path / "prefixed.gguf")).all()
    path, _ = files["Q4_K"]
    facts = inspect_model(str(path))
    packed = sum(entry.end - entry.start for entry in read_gguf(path).values() if entry.dtype == "Q4_K")
    rest = sum(np.prod(entry.shape) * 4 for entry in read_gguf(path).values() if entry.dtype != "Q4_K")
    assert bytes_per_rank(facts, dtype="fp32", tensor=1) == packed + rest


@pytest.mark.parametrize(("causal", "family"), [(True, "ltx-0.9.5"), (False, "ltx"), (None, "ltx")])
def test_what_a_file_says_of_itself_tells_families_of_the_same_tensors_apart(tmp_path, causal, family):
    """LTX-Video 0.9.5 and newer: ComfyUI's loaders of GGUF hand its `config` on as that of a .safetensors file."""
    shapes = inspect_model("random:ltx").shapes
    tensors = {name: (np.zeros(shape, np.float32), "F32") for name, shape in shapes.items()}
    said = {} if causal is None else {"config": json.dumps({"transformer": {"causal_temporal_positioning": causal}})}
    assert inspect_model(str(write_tensors(tmp_path / "ltx.gguf", tensors, **said))).family == family


def test_a_cut_through_blocks_is_refused_by_the_plan_with_the_nearest(files):
    path, _ = files["Q4_K"]
    facts, machine = inspect_model(str(path)), Machine(cores=4, cuda=())
    with pytest.raises(
        PlanRefused, match=r"within a group of 256, which Q4_K .*nearest plan that works.*tensor 2"
    ) as refusal:
        make_plan(ParallelSettings(devices="cpu:4", tensor=4), facts, machine)
    assert refusal.value.nearest.product == 4
    assert (
        make_plan(ParallelSettings(devices="cpu:4", tensor=4), inspect_model(str(files["Q8_0"][0])), machine).tensor
        == 4
    )


def test_another_quant_on_top_is_refused(files):
    for quant in ("fp8", "svdquant-int4"):
        with pytest.raises(Refused, match=r"quantised already: set quant to none"):
            inspect_model(str(files["Q8_0"][0]), quant=quant)


def header(*, tensors: int = 1, values: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def tensor(name: bytes = b"a", dims: tuple[int, ...] = (32,), number: int = 8, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", number, offset)


def value(key: bytes, kind: int, packed: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + packed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"once upon a time", "but a text file"),
        (b"", "not a .gguf file"),
        (b"GGUF", "goes on beyond"),
        (header(version=0x03000000), "big-endian"),
        (header(version=7), "it is GGUF version 7, but 2 and 3 are read"),
        (header(tensors=1 << 60), f"should have {1 << 60} tensors"),
        (header(values=1 << 60), f"and {1 << 60} values"),
        (header(tensors=1 << 16), "goes on beyond"),
        (header(values=1 << 16), "goes on beyond"),
        (header(values=1, rest=value(b"k", 9, struct.pack("<IQ", 4, 1 << 62))), "go on beyond"),
        (header(values=1, rest=value(b"k", 9, struct.pack("<IQ", 8, 1 << 62))), f"a list of {1 << 62} texts"),
        (header(values=1, rest=value(b"k", 9, struct.pack("<IQ", 9, 1))), "value of type 9"),
        (header(values=1, rest=value(b"k", 77, b"")), "value of type 77"),
        (header(values=1, rest=value(b"general.alignment", 4, struct.pack("<I", 0))), "aligned to 0"),
        (header(rest=struct.pack("<Q", 1 << 50)), "go on beyond"),
        (header(rest=struct.pack("<Q", 1) + b"\xff"), "utf-8"),
        (header(rest=tensor(dims=(1,) * 99)), "99 dims"),
        (header(rest=tensor(dims=(1 << 40, 1 << 40))), "but the file has"),
        (header(rest=tensor(dims=(33,))), "no whole number of blocks"),
        (header(rest=tensor(offset=8)), "at byte 8 of the data, which is no multiple of 32"),
        (
            header(tensors=2, rest=tensor(number=2) + tensor(b"b", offset=96) + b"\0" * 222),
            "are 78 bytes between its tensors",
        ),
        (header(tensors=2, rest=tensor() + tensor(b"b") + b"\0" * 99), "tensors 'a' and 'b' share bytes"),
        (header(rest=tensor(offset=1 << 50)), "but the file has"),
        (header(rest=tensor(number=26)), "is I32, which is not read. There are: F32"),
        (header(rest=tensor(number=99)), "of format 99"),
        (header(tensors=2, rest=tensor() + tensor() + b"\0" * 99), "tensor 'a' more than once"),
        (
            header(
                values=1,
                rest=value(b"comfy.gguf.orig_shape.a", 9, struct.pack("<IQii", 5, 2, 5, 5)) + tensor() + b"\0" * 99,
            ),
            r"should be (5, 5)",
        ),
    ],
)
def test_a_header_is_not_believed(tmp_path, content, words):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(Refused) as refusal:
        inspect_model(str(tmp_path / "model.gguf"))
    assert words in str(refusal.value) and str(tmp_path / "model.gguf") in str(refusal.value), str(refusal.value)
