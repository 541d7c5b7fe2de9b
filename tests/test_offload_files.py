"""Blocks streamed from files that do not have their weights as the class does: fused, packed, in 8 bits, cut over ranks."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.mesh import Mesh
from runtime.offload import parts
from runtime.offload.layout import Held, Layout
from runtime.offload.parts import MemoryPart, stored_part
from runtime.offload.tensor_file import TensorFile
from runtime.offload.weights import ReadWeights, StagedWeights, Staging
from runtime.parallel.shares import WHOLE, Cut
from runtime.quant.svdquant.formats import INT4
from runtime.quant.svdquant.tensors import PackedCut, Packing
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_on_one
from tests.test_nunchaku_file import write_both

SAME, PACKED = 2e-6, 1e-4
FROM_DISK = {"offload": "disk", "resident_blocks": "0"}
LAYERWISE = {"offload": "layerwise", "resident_blocks": "0"}
FUSED = {
    r"(transformer_blocks\.\d+)\.attn\.to_q\.": (r"double_\1.img_attn.qkv.", ("to_q", "to_k", "to_v")),
    r"(transformer_blocks\.\d+)\.attn\.add_q_proj\.": (
        r"double_\1.txt_attn.qkv.",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
    ),
    r"single_transformer_(blocks\.\d+)\.attn\.to_q\.": (
        r"single_\1.linear1.",
        ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    ),
}
"""A tensor of diffusers' Flux -> what Black Forest Labs' file fuses it into, and with which others."""


def in_original_layout(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a Flux with those of its attention fused as in the original file."""
    left = dict(weights)
    for name in weights:
        for pattern, (fused, members) in FUSED.items():
            if re.match(pattern, name):
                names = [name.replace(members[0], member) for member in members]
                stored = re.sub(pattern, fused, name).replace("double_transformer_", "double_")
                left[stored] = torch.cat([left.pop(member) for member in names])
    return left


@pytest.fixture(scope="module")
def flux_files(tmp_path_factory):
    """One Flux as a folder of diffusers, a file of Nunchaku's and one in the original layout."""
    folder, packed = write_both(tmp_path_factory.mktemp("flux"))
    original = folder / "flux-original.safetensors"
    save_file(in_original_layout(load_file(folder / "diffusion_pytorch_model.safetensors")), original)
    return {"folder": folder, "packed": packed, "original": original}


@pytest.fixture(scope="module")
def latents(flux_files):
    """Of each file, resident on one rank."""
    return {name: run_on_one([case_of(path)])[0] for name, path in flux_files.items()}


def case_of(path, **settings) -> Case:
    return Case(model=str(path), family="flux", latent=(1, 16, 8, 8), steps=2, **settings)


@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"ulysses": 2}], ids=str)
@pytest.mark.parametrize("memory", [FROM_DISK, LAYERWISE], ids=lambda memory: memory["offload"])
@pytest.mark.parametrize("name", ["packed", "original"])
def test_the_latent_is_that_of_the_resident_model(name, memory, degrees, flux_files, latents):
    case = case_of(flux_files[name], degrees=degrees, memory=memory)
    found = run_as_threads(degrees, lambda mesh: run_case(case, mesh, {})) if degrees else [run_case(case, one(), {})]
    limit = SAME if name == "original" or not degrees else PACKED
    assert max(relative_error(latent, latents[name]) for latent in found) < limit
    assert relative_error(latents[name], latents["folder"]) < PACKED


def one() -> Mesh:
    return Mesh.single()


PACKING = Packing(256, 128, 16, INT4)
CUTS = {
    "whole": (WHOLE, ()),
    "rows": (Cut(0, (slice(8, 40),)), ()),
    "rows of blocks": (Cut(0, (slice(8, 40), slice(136, 168))), ()),
    "columns": (Cut(1, (slice(4, 20),)), ()),
    "columns of blocks": (Cut(1, (slice(4, 20), slice(36, 52))), ()),
    "fused": (WHOLE, (slice(64, 128),)),
    "fused and swapped": (WHOLE, (slice(64, 128), slice(0, 64))),
    "rows of fused": (Cut(0, (slice(32, 96),)), (slice(64, 128), slice(0, 64))),
    "columns of fused": (Cut(1, (slice(8, 24),)), (slice(64, 128), slice(0, 64))),
    "packed": (PackedCut("qweight", PACKING, (slice(0, 128),), (slice(0, 128),)), ()),
}


@pytest.mark.parametrize("chunk", [100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", CUTS)
def test_any_bytes_of_a_part_are_those_of_the_tensor(name, dtype, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "CHUNK_BYTES", chunk)
    cut, rows = CUTS[name]
    full = torch.randn(256, 64)
    if name == "packed":
        full, dtype = torch.randint(-128, 127, (256, 64), dtype=torch.int8), torch.int8
    save_file({"x": full, "before": torch.ones(3)}, tmp_path / "x.safetensors")
    chosen = torch.cat([full[span] for span in rows]) if rows else full
    wanted = cut.take(chosen).to(dtype).contiguous()
    part = stored_part(
        TensorFile(tmp_path / "x.safetensors").get_slice("x"), rows, cut, shape=wanted.shape, dtype=dtype
    )
    expected = wanted.view(-1).view(torch.uint8)
    for start, stop in ((0, len(expected)), (1, 7), (101, len(expected) - 3), (5, 5)):
        buffer = torch.zeros(stop - start, dtype=torch.uint8)
        part.read_into(buffer, start)
        assert torch.equal(buffer, expected[start:stop])


def test_a_number_is_a_part(tmp_path):
    save_file({"scale": torch.tensor(2.5)}, tmp_path / "x.safetensors")
    stored = TensorFile(tmp_path / "x.safetensors").get_slice("scale")
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.zeros(dtype.itemsize, dtype=torch.uint8)
        stored_part(stored, (), WHOLE, shape=torch.Size(), dtype=dtype).read_into(buffer, 0)
        assert buffer.view(dtype) == 2.5


@pytest.mark.parametrize("staged", [False, True])
def test_a_buffer_gets_any_span_of_the_weights_of_a_block(staged):
    tensors = [torch.randn(4, 8), torch.randn(96), torch.randn(16)]
    layout = Layout([Held(None, "", tensor.shape, tensor.dtype) for tensor in tensors])
    weights = ReadWeights(layout, [MemoryPart(tensor) for tensor in tensors])
    if staged:
        weights = StagedWeights(weights, Staging(layout.nbytes, device=torch.device("cpu")))
    whole = torch.zeros(layout.nbytes, dtype=torch.uint8)
    weights.fill(whole)
    assert all(map(torch.equal, layout.views(whole), tensors))
    for start, length in ((0, 64), (60, 100), (layout.nbytes - 7, 64)):
        buffer = torch.zeros(length, dtype=torch.uint8)
        weights.fill(buffer, start)
        inside = whole[start : start + length]
        assert torch.equal(buffer[: len(inside)], inside)
