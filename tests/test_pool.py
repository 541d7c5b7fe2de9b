"""Shared memory is reused, bounded, given back, and never left behind."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from zmq import Frame

from runtime import folders
from runtime.channel import decode, encode, parse
from runtime.errors import ProtocolError, Refused
from runtime.folders import SHARED_MEMORY, PrivateFolder, shared_folder, sweep
from runtime.message import TensorRef
from runtime.pool import HEADER_BYTES, Mappings, Pool
from runtime.protocol import Sampled, event_from

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no /dev/shm: tensors use frames")
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder():
    made = PrivateFolder(SHARED_MEMORY)
    yield made.path
    made.remove()


def numbers(mib, value=1.0):
    return torch.full((mib * MIB // 4,), value)


def ref_to(name, tensor):
    nbytes = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRef(dtype=dtype, shape=tuple(tensor.shape), nbytes=nbytes, segment=name)


def sent(pool, tensor, mappings):
    """The tensor as the other side has it."""
    frames, _ = encode(Sampled(job="j", latent=tensor, seconds=0.0), pool=pool)
    received = [Frame(bytes(frame)) for frame in frames]
    return decode(parse(received, event_from), received, mappings=mappings, give_back=True).latent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_a_tensor_arrives_as_it_was(folder, dtype):
    pool, mappings = Pool(folder, owner="a"), Mappings(folder)
    tensor = (torch.rand(3, MIB // 2) * 100).to(dtype)
    for view in (tensor, tensor.flip(0), tensor.T, tensor[:, ::2]):  # the second and later go into warm memory
        assert torch.equal(sent(pool, view, mappings), view)


def test_a_large_tensor_has_no_frame_and_a_small_one_no_segment(folder):
    pool = Pool(folder, owner="a")
    assert len(encode(Sampled(job="j", latent=numbers(1), seconds=0.0), pool=pool)[0]) == 1
    assert len(encode(Sampled(job="j", latent=torch.zeros(MIB // 4 - 1), seconds=0.0), pool=pool)[0]) == 2


def test_fifty_sends_use_one_segment(folder):
    pool, mappings = Pool(folder, owner="a"), Mappings(folder)
    for value in range(50):
        assert sent(pool, numbers(2, value), mappings)[-1] == value
    assert len(pool.names()) == 1
    assert len(list(folder.glob("a-*"))) == 1


def test_a_segment_is_given_back_with_the_last_reference(folder):
    pool, mappings = Pool(folder, owner="a"), Mappings(folder)
    first = sent(pool, numbers(2, 1.0), mappings)
    second = sent(pool, numbers(2, 2.0), mappings)
    view = first.view(-1, 4)[5:]
    del first
    third = sent(pool, numbers(2, 3.0), mappings)
    assert (view == 1).all() and (second == 2).all() and (third == 3).all()  # nobody's memory was reused
    assert len(pool.names()) == 3
    del view, second
    sent(pool, numbers(2, 4.0), mappings)
    assert len(pool.names()) == 3 and (third == 3).all()


def test_a_reference_cycle_gives_back_when_it_is_collected(folder):
    pool, mappings = Pool(folder, owner="a"), Mappings(folder)
    holder = [sent(pool, numbers(2), mappings)]
    holder.append(holder)
    del holder
    gc.collect()
    sent(pool, numbers(2), mappings)
    assert len(pool.names()) == 1


def test_a_request_is_given_back_by_its_sender_not_by_its_readers(folder):
    pool, readers = Pool(folder, owner="client"), [Mappings(folder), Mappings(folder)]
    name = pool.put(numbers(2, 7.0))
    for reader in readers:
        assert (reader.tensor(ref_to(name, numbers(2)), give_back=False) == 7).all()
    assert pool.put(numbers(2)) != name
    pool.give_back(name)
    assert pool.put(numbers(2)) == name


def test_the_best_fit_is_taken_and_a_much_larger_one_is_not(folder):
    pool = Pool(folder, owner="a")
    large, middle = pool.put(numbers(16)), pool.put(numbers(5))
    pool.give_back(large), pool.give_back(middle)
    assert pool.put(numbers(4)) == middle
    assert pool.put(numbers(4)) not in (large, middle)
    assert pool.put(numbers(9)) == large


def test_over_its_limit_a_pool_drops_what_is_free_and_then_refuses(folder):
    pool = Pool(folder, owner="a", limit=10 * MIB)
    first, second = pool.put(numbers(4)), pool.put(numbers(4))
    assert pool.put(numbers(4)) is None
    pool.give_back(first), pool.give_back(second)
    assert pool.put(numbers(10)) is not None and len(pool.names()) == 1
    assert pool.put(numbers(11)) is None


def test_a_full_file_system_is_refused_not_a_crash(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    pool = Pool(folder, owner="a")
    assert pool.put(numbers(2)) is None and not pool.names() and not list(folder.glob("a-*"))
    frames, refs = encode(Sampled(job="j", latent=numbers(2), seconds=0.0), pool=pool)
    assert len(frames) == 2 and refs[0].frame == 1


def test_a_tensor_stays_readable_when_its_sender_and_the_folder_are_gone(folder):
    pool, mappings = Pool(folder, owner="a"), Mappings(folder)
    tensor = sent(pool, numbers(2, 5.0), mappings)
    pool.close()
    assert not list(folder.glob("a-*")) and (tensor == 5).all()


def test_mappings_of_deleted_segments_are_forgotten(folder):
    mappings = Mappings(folder)
    for _ in range(5):
        pool = Pool(folder, owner="a")
        sent(pool, numbers(2), mappings)
        pool.close()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert maps.read_text().count(folder.name) <= 1


@pytest.mark.parametrize("name", ["a-1", "nothing"])
def test_a_segment_that_is_not_there_is_refused(folder, name):
    with pytest.raises(ProtocolError, match="No such file"):
        Mappings(folder).tensor(ref_to(name, numbers(1)), give_back=True)


def test_a_segment_that_is_too_small_is_refused(folder):
    (folder / "small").write_bytes(bytes(HEADER_BYTES + MIB - 1))
    mappings = Mappings(folder)
    with pytest.raises(ProtocolError, match="not room for"):
        mappings.tensor(ref_to("small", numbers(1)), give_back=True)
    name = Pool(folder, owner="a").put(numbers(1))
    mappings.tensor(ref_to(name, numbers(1)), give_back=True)
    with pytest.raises(ProtocolError, match="smaller"):
        mappings.tensor(ref_to(name, numbers(3)), give_back=True)


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(HEADER_BYTES + MIB))
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ProtocolError):
        Mappings(folder).tensor(ref_to("link", numbers(1)), give_back=True)


def test_a_folder_is_private_and_only_ours_is_found(folder):
    assert folder.stat().st_mode & 0o077 == 0
    assert shared_folder(folder.name) == folder
    assert shared_folder("") is None and shared_folder("..") is None and shared_folder("other") is None
    assert shared_folder(f"{folder.name}-not-there") is None


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"private folder .*file/outrigger-.*TMPDIR"):
        PrivateFolder(tmp_path / "file")


def test_a_folder_that_cannot_be_locked_is_removed_again(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.fcntl, "flock", full)
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    with pytest.raises(Refused, match=f"No space left on device; make {tmp_path} writable, with room in it$"):
        PrivateFolder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_folders_are_swept_when_their_owner_was_killed_and_kept_while_it_lives(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from runtime.folders import PrivateFolder;"
        "print(PrivateFolder(Path(sys.argv[1])).path, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    path = Path(owner.stdout.readline().strip())
    sweep(tmp_path)
    assert path.is_dir()
    owner.kill(), owner.wait()
    sweep(tmp_path)
    assert not path.exists()


def test_a_folder_about_to_be_locked_is_not_swept(tmp_path):
    path = tmp_path / f"{folders._PREFIX}abc"
    path.mkdir()
    sweep(tmp_path)
    assert path.is_dir()
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    sweep(tmp_path)
    assert not path.exists()
