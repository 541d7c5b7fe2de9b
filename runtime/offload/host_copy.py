"""Weights that the ranks of a machine hold once in its memory: each makes its share of them, and all map what every one made.

The memory is a file without a name (`memfd_create`), which another process opens through /proc while its maker holds it
open. No folder has it, so nothing is left when processes are killed, and the size of /dev/shm does not bound it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..parallel.collectives import all_gather_bytes
from .layout import aligned

PROBE = b"outrigger"


class Share(NamedTuple):
    """Which tensors this rank makes for the ranks that hold the same; `group` None: all, for itself."""

    group: dist.ProcessGroup | None
    units: Mapping[str, int]

    @classmethod
    def of(cls, units: Sequence[str], group: dist.ProcessGroup | None) -> Share:
        """The units of a model, dealt in turn."""
        return cls(group, {unit: number for number, unit in enumerate(dict.fromkeys(units))})

    def has(self, unit: str) -> bool:
        """Whether this rank makes the tensors of a unit."""
        return self.group is None or self.units[unit] % dist.get_world_size(self.group) == dist.get_rank(self.group)


def sharing(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group where its ranks can map each other's memory; None where they cannot, and each holds a copy of its own."""
    if group is None:
        return None
    descriptor = os.memfd_create("outrigger-probe") if hasattr(os, "memfd_create") else -1
    if descriptor >= 0:
        os.write(descriptor, PROBE)
    told = _exchange([os.getpid(), descriptor], group)
    can = all(_exchange(all(_is_readable(pid, number) for pid, number in told), group))
    if descriptor >= 0:
        os.close(descriptor)
    return group if can else None


def hold_once(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Have one copy of a model that every rank of the group has read whole, where they can map each other's memory; all
    ranks call it together.
    """
    group = sharing(group)
    if group is not None:
        names = [name for name, _ in model.named_parameters()]
        share_parameters(model, names[dist.get_rank(group) :: dist.get_world_size(group)], group=group)


def share_parameters(model: nn.Module, names: Sequence[str], *, group: dist.ProcessGroup | None) -> None:
    """Move the parameters of these names as `share` does."""
    share(names, get=model.get_parameter, put=partial(_put, model), group=group)


def share(
    names: Sequence[str],
    *,
    get: Callable[[str], torch.Tensor],
    put: Callable[[str, torch.Tensor], None],
    group: dist.ProcessGroup | None,
) -> None:
    """Move the tensors of these names, which this rank has made, into memory that every rank of the group maps, and put
    there those that the others have made; all ranks call it together. Without a group they move into such memory too, one
    after the other in this order.
    """
    sizes = [aligned(get(name).nbytes) for name in names]
    own, table, at = Segment.create(sum(sizes)), [], 0
    for name, size in zip(names, sizes, strict=True):
        tensor = get(name)
        table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
        own.view(*table[-1][1:]).copy_(tensor)
        put(name, own.view(*table[-1][1:]))
        at += size
    if group is not None:
        for rank, (pid, number, nbytes, others) in enumerate(_exchange([*own.place, table], group)):
            if rank != dist.get_rank(group):
                segment = Segment.open(pid, number, nbytes)
                for name, *place in others:
                    put(name, segment.view(*place))
        _exchange(None, group)  # until all have opened it
    own.close()


class Segment:
    """Memory that other processes can map for as long as its descriptor is open here."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor, self._nbytes = descriptor, nbytes
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """New memory, all zeros."""
        nbytes = max(nbytes, 1)
        if not hasattr(os, "memfd_create"):
            return cls(-1, nbytes)
        descriptor = os.memfd_create("outrigger-weights")
        os.ftruncate(descriptor, nbytes)
        return cls(descriptor, nbytes)

    @classmethod
    def open(cls, pid: int, number: int, nbytes: int) -> Segment:
        """The memory behind a descriptor of another process."""
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return cls(descriptor, nbytes)
        finally:
            os.close(descriptor)

    @property
    def place(self) -> tuple[int, int, int]:
        """Process, descriptor and bytes: what `open` takes."""
        return os.getpid(), self._descriptor, self._nbytes

    def view(self, dtype: str, shape: Sequence[int], start: int) -> torch.Tensor:
        """A tensor in it, which keeps the memory."""
        kind = getattr(torch, dtype)
        return self._bytes[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)

    def close(self) -> None:
        """Have no others open it from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank says, by rank."""
    return [json.loads(told) for told in all_gather_bytes(json.dumps(value).encode(), group)]


def _is_readable(pid: int, number: int) -> bool:
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(PROBE), 0) == PROBE
    finally:
        os.close(descriptor)
