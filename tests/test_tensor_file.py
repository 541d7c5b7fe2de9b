"""A file that is read by hand gives what safetensors gives."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime.offload import tensor_file
from runtime.offload.tensor_file import TensorFile

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64)
PLACES = (
    slice(None),
    slice(3, 9),
    (slice(2, 5),),
    (slice(None), slice(1, 4)),
    (slice(4, 11), slice(0, 1)),
    (slice(0, 0),),
    (slice(None), slice(2, 2)),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): (torch.randn(11, 6, generator=generator) * 9).to(dtype) for dtype in DTYPES}
    save_file({**tensors, "row": torch.arange(7.0), "number": torch.tensor(5.0), "cube": torch.randn(3, 4, 5)}, path)
    return path


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_slice_is_that_of_safetensors(path, place, chunk, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk)
    ours = TensorFile(path)
    with safe_open(path, framework="pt") as theirs:
        for name in (*map(str, DTYPES), "cube"):
            read, wanted = ours.get_slice(name)[place], theirs.get_tensor(name)[place]
            assert read.shape == wanted.shape and read.dtype == wanted.dtype
            assert torch.equal(read.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_vectors_and_numbers_are_read_whole(path):
    file = TensorFile(path)
    assert torch.equal(file.get_slice("row")[slice(None)], torch.arange(7.0))
    assert torch.equal(file.get_slice("number")[slice(None)], torch.tensor(5.0))
    assert file.get_slice("cube").get_shape() == [3, 4, 5]


def test_a_file_that_was_cut_short_meanwhile_is_an_error(path, tmp_path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(path.read_bytes())
    file = TensorFile(copy)
    with copy.open("r+b") as handle:
        handle.truncate(copy.stat().st_size // 2)
    with pytest.raises(OSError, match="ended while it was read"):
        for name in map(str, DTYPES):
            file.get_slice(name)[slice(None)]
