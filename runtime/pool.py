"""Reused segments of shared memory, for large tensors between processes of one machine.

A segment is a file in the sidecar's folder under /dev/shm: one page of header, then the bytes of a tensor. The first
byte of the header says whether the segment is in use. The sender sets it, and whoever is last clears it: the reader of
an event when its tensor goes (no message is needed, so this is safe inside a garbage collection), the sender of a
request when the job has ended. The sender looks at these bytes when it needs a segment, and so fills warm memory.

Not `multiprocessing.shared_memory`: before Python 3.13 its tracker deletes a segment that another process made.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ProtocolError, Refused, shown
from .folders import SHARED_MEMORY
from .message import TensorRef

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 4096
SMALLEST_BYTES = 1 << 20
"""Tensors under this size travel in frames."""
SPARE_BYTES = 2 << 30
"""Free segments are kept up to this size in all."""
LIMIT_VARIABLE = "OUTRIGGER_POOL_BYTES"
_IN_USE, _FREE = 1, 0
_BYTES = re.compile(r"[0-9]{1,18}")


def pool_limit() -> int:
    """Most bytes one process may put into shared memory: what the user set, or half of what /dev/shm can hold.

    Raises `Refused` when what the user set is not a number.
    """
    chosen = os.environ.get(LIMIT_VARIABLE, "")
    if chosen:
        if not _BYTES.fullmatch(chosen.strip()):
            raise Refused(
                f"{LIMIT_VARIABLE} {shown(chosen)} is not a number of bytes such as 1073741824, or 0 for no shared memory"
            )
        return int(chosen)
    if not SHARED_MEMORY.is_dir():
        return 0
    status = os.statvfs(SHARED_MEMORY)
    return status.f_blocks * status.f_frsize // 2


class Segment:
    """One file of shared memory, made with its first tensor. Raises `OSError` when there is no room."""

    def __init__(self, path: Path, capacity: int, tensor: torch.Tensor) -> None:
        self.path, self.capacity = path, capacity
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + capacity)  # a full /dev/shm fails here, not at a write
            _write(descriptor, bytes_of(tensor))  # new memory fills faster so than through a mapping
            self.memory = mmap.mmap(descriptor, HEADER_BYTES + capacity)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.memory[0] = _IN_USE

    @property
    def name(self) -> str:
        """The name that goes over the wire."""
        return self.path.name

    @property
    def in_use(self) -> bool:
        """Whether a reader may still look at it."""
        return self.memory[0] == _IN_USE

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy another tensor in, straight from where it is, and mark the segment as in use."""
        import torch

        nbytes = tensor.numel() * tensor.element_size()
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=HEADER_BYTES)
        flat.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self.memory[0] = _IN_USE


class Pool:
    """The segments that this process writes, under `folder`; at most `limit` bytes in all."""

    def __init__(self, folder: Path | None, *, owner: str, limit: int | None = None) -> None:
        self.limit = (pool_limit() if limit is None else limit) if folder else 0
        self._folder, self._prefix = folder, f"{owner}-{secrets.token_hex(4)}"
        self._segments: dict[str, Segment] = {}
        self._made = 0

    def put(self, tensor: torch.Tensor) -> str | None:
        """The name of a segment that now holds `tensor`, or None when there is no room for it."""
        nbytes = tensor.numel() * tensor.element_size()
        segment = self._best_free(nbytes)
        if segment is not None:
            segment.fill(tensor)
        else:
            segment = self._new(_size_class(nbytes), tensor)
        if segment is None:
            return None
        self._drop_free(SPARE_BYTES)
        return segment.name

    def give_back(self, name: str) -> None:
        """Free a segment whose readers are known to be through."""
        if name in self._segments:
            self._segments[name].memory[0] = _FREE

    def names(self) -> tuple[str, ...]:
        """The segments there are, free or not."""
        return tuple(self._segments)

    def close(self) -> None:
        """Delete the files; readers keep what they have mapped."""
        for name in self.names():
            self._drop(name)

    def _best_free(self, nbytes: int) -> Segment | None:
        fitting = (s for s in self._segments.values() if nbytes <= s.capacity <= 2 * nbytes and not s.in_use)
        return min(fitting, key=lambda segment: segment.capacity, default=None)

    def _new(self, capacity: int, tensor: torch.Tensor) -> Segment | None:
        if self._total() + capacity > self.limit:
            self._drop_free(0)
        if self._folder is None or self._total() + capacity > self.limit:
            return None
        self._made += 1
        try:
            segment = Segment(self._folder / f"{self._prefix}-{self._made}", capacity, tensor)
        except OSError:
            return None
        return self._segments.setdefault(segment.name, segment)

    def _total(self) -> int:
        return sum(segment.capacity for segment in self._segments.values())

    def _drop_free(self, keep: int) -> None:
        free = [segment for segment in self._segments.values() if not segment.in_use]
        excess = sum(segment.capacity for segment in free) - keep
        for segment in free:  # oldest first
            if excess > 0:
                self._drop(segment.name)
                excess -= segment.capacity

    def _drop(self, name: str) -> None:
        self._segments.pop(name).path.unlink(missing_ok=True)


class Mappings:
    """The segments of other processes that this process reads, each mapped once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._mapped: dict[str, mmap.mmap] = {}

    def tensor(self, ref: TensorRef, *, give_back: bool) -> torch.Tensor:
        """The tensor over the segment's memory, without a copy.

        With `give_back` the segment is free for its sender once the last reference to that memory is gone. Raises
        `ProtocolError` when there is no such segment, or it is smaller than the reference says.
        """
        import numpy

        memory = self._memory(ref)
        array = numpy.frombuffer(memory, dtype=numpy.uint8, count=ref.nbytes, offset=HEADER_BYTES)
        if give_back:
            weakref.finalize(array, _clear, memory).atexit = False
        return tensor_over(array, ref)

    def discard(self, name: str) -> None:
        """Free a segment that nobody will read."""
        try:
            _clear(self._map(name, 0))
        except ProtocolError:
            return  # its sender is gone, and the file with it

    def _memory(self, ref: TensorRef) -> mmap.mmap:
        name = str(ref.segment)
        if name not in self._mapped:
            self._forget_deleted()
            self._mapped[name] = self._map(name, ref.nbytes)
        if len(self._mapped[name]) < HEADER_BYTES + ref.nbytes:
            raise ProtocolError(f"segment {name} is smaller than the {ref.nbytes} bytes it is said to hold")
        return self._mapped[name]

    def _map(self, name: str, nbytes: int) -> mmap.mmap:
        if self._folder is None:
            raise ProtocolError(f"segment {name}: this connection has no shared memory")
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ProtocolError(f"segment {name}: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size < HEADER_BYTES + nbytes:
                raise ProtocolError(f"segment {name} has {size} bytes, not room for {nbytes}")
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def _forget_deleted(self) -> None:
        for name in [n for n in self._mapped if self._folder and not (self._folder / n).exists()]:
            del self._mapped[name]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes: its own memory where it is contiguous and on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def tensor_over(array: object, ref: TensorRef) -> torch.Tensor:
    """A tensor of the reference's dtype and shape over a numpy array of its bytes."""
    import torch

    dtype = getattr(torch, ref.dtype)
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=dtype)
    return torch.from_numpy(array).view(dtype).view(ref.shape)


def _write(descriptor: int, content: memoryview) -> None:
    written = 0
    while written < len(content):  # one call writes 2 GiB at most
        written += os.pwrite(descriptor, content[written:], HEADER_BYTES + written)


def _clear(memory: mmap.mmap) -> None:
    memory[0] = _FREE


def _size_class(nbytes: int) -> int:
    """The next multiple of an eighth of the power of two below: at most 12.5 % more than asked for."""
    step = max(HEADER_BYTES, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
