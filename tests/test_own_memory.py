"""Large tensors that a rank has made of a file lie in memory of their own, which goes back when the model is let go of."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from runtime import own_memory
from runtime.mesh import Mesh
from runtime.own_memory import LARGE_BYTES, empty, held, joined
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from tests.processes import ROOT

READ_AND_DROPPED = """
import re, sys
from pathlib import Path
from runtime.offload.tensor_file import TensorFile
from runtime.read_ahead import read_ahead
from runtime.release import release_memory

own = lambda: int(re.search("RssAnon:\\\\s*(\\\\d+)", Path("/proc/self/status").read_text())[1]) << 10
file, taken, left = TensorFile(Path(sys.argv[1])), [], [own()]
for _ in range(3):
    model = list(read_ahead(lambda name: file.get_slice(name)[:, :1024], map(str, range(12)), threads=4))
    taken.append(own() - left[-1])
    del model
    release_memory()
    left.append(own())
print(taken[-1], left[-1] - left[1])
"""
"""What this process has of its own of the left halves of tensors, and after them more than after the first time."""


def test_what_threads_have_read_goes_back(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({str(number): torch.zeros(1024 + 128 * number, 2048) for number in range(12)}, path)
    command = [sys.executable, "-c", READ_AND_DROPPED, path]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    taken, left = map(int, told.split())
    half = path.stat().st_size // 2
    print(f"{taken >> 20} MiB for {half >> 20}, then {left >> 20}")
    assert 0.95 * half < taken < 1.2 * half and left < 0.05 * half


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_that_a_model_has_of_its_own_lies_so(dtype, monkeypatch):
    monkeypatch.setattr(own_memory, "LARGE_BYTES", 0)
    model = ModelSettings(model="random:flux", dtype=dtype)
    transformer = Pipeline.load(model, mesh=Mesh.single(), progress=ignore_progress).transformer
    assert not [name for name, each in transformer.named_parameters() if each.untyped_storage().resizable()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_only_what_lies_elsewhere_or_is_of_another_format_is_copied(dtype):
    tensor = torch.arange(3 << 20).remainder(100).to(dtype).view(3, -1)
    own = held(tensor, None)
    assert own.data_ptr() != tensor.data_ptr() and torch.equal(own.view(torch.uint8), tensor.view(torch.uint8))
    assert held(own, dtype) is own and held(own, None) is own
    other = held(own, torch.float16)
    assert other.dtype == torch.float16 and torch.equal(other, tensor.to(torch.float16))


@pytest.mark.parametrize("nbytes", [0, 1, LARGE_BYTES - 1, LARGE_BYTES])
def test_small_ones_stay_in_the_heap(nbytes):
    tensor = empty((nbytes,), torch.uint8)
    assert tensor.shape == (nbytes,) and tensor.untyped_storage().resizable() == (nbytes < LARGE_BYTES)
    assert held(tensor, None).shape == (nbytes,)


def test_an_empty_shape_is_a_number(monkeypatch):
    monkeypatch.setattr(own_memory, "LARGE_BYTES", 0)
    assert empty((), torch.float32).fill_(3).item() == 3
    assert (empty((2, 3), torch.float64).fill_(2).sum(0) == 4).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_put_together_lies_so(dim, monkeypatch):
    monkeypatch.setattr(own_memory, "LARGE_BYTES", 0)
    pieces = [torch.randn(2, 3), torch.randn(*((4, 3) if dim == 0 else (2, 4)))]
    both = joined(pieces, dim=dim)
    assert torch.equal(both, torch.cat(pieces, dim=dim)) and not both.untyped_storage().resizable()
