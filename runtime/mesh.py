"""Degrees -> named axes -> process groups. Everything below takes a group, never the world."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from .timers import patient_threads

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Mesh:
    """Where one rank stands: its place along each axis, and the ranks it shares that axis with.

    Rank numbers run along the last axis first, so the axis that talks most is given last. `control` is the group
    of all ranks, for single numbers on the CPU; it has gloo beside NCCL.
    """

    def __init__(
        self,
        degrees: Mapping[str, int],
        *,
        rank: int,
        device: torch.device,
        groups: Mapping[tuple[str, ...], dist.ProcessGroup] | None = None,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.device, self.control = rank, device, control
        self.world = math.prod(degrees.values())
        self._degrees, self._groups = dict(degrees), dict(groups or {})
        self._place = dict(zip(degrees, _place(rank, tuple(degrees.values())), strict=True))

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Mesh:
        """A mesh of one rank, with no process group."""
        return cls({}, rank=0, device=torch.device(device))

    @classmethod
    def alone(cls, degrees: Mapping[str, int], *, device: torch.device | str) -> Mesh:
        """The mesh of this process by itself, whatever others there are; each degree is 1."""
        return cls(degrees, rank=0, device=torch.device(device))

    @classmethod
    def of_world(cls, degrees: Mapping[str, int], *, device: torch.device | str) -> Mesh:
        """The mesh over the ranks of the default process group, which all call this together.

        Raises `ValueError` when the product of the degrees is not their number.
        """
        device, rank = torch.device(device), dist.get_rank()
        if math.prod(degrees.values()) != dist.get_world_size():
            raise ValueError(f"{dict(degrees)} is not a mesh of {dist.get_world_size()} ranks")
        groups = {(axis,): _own_group((axis,), degrees) for axis, degree in degrees.items() if degree > 1}
        return cls(degrees, rank=rank, device=device, groups=groups, control=dist.group.WORLD)

    @classmethod
    def join(
        cls,
        degrees: Mapping[str, int],
        *,
        rank: int,
        device: torch.device | str,
        init_method: str,
        timeout: float = 1800,
    ) -> Mesh:
        """Meet the other ranks at `init_method` (`tcp://127.0.0.1:PORT` or `file:///...`) and form the mesh."""
        device, world = torch.device(device), math.prod(degrees.values())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if world == 1:
            return cls(degrees, rank=0, device=device)
        with patient_threads():
            dist.init_process_group(
                BACKENDS[device.type],
                rank=rank,
                world_size=world,
                init_method=init_method,
                timeout=timedelta(seconds=timeout),
            )
        return cls.of_world(degrees, device=device)

    def degree(self, axis: str) -> int:
        """Size of an axis; 1 for one the mesh does not have."""
        return self._degrees.get(axis, 1)

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self._place.get(axis, 0)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axes` alone, by rank; None when it is the only one.

        A group of several axes is formed when it is first asked for, so all ranks ask for it together.
        """
        key = self._key(axes)
        if key and key not in self._groups:
            self._groups[key] = _own_group(key, self._degrees)
        return self._groups.get(key)

    def own_group(self, *axes: str) -> dist.ProcessGroup | None:
        """A new group of the ranks that differ from this one along `axes` alone, for a thread that talks beside the others;
        None when it is the only one. All ranks ask for it together.
        """
        key = self._key(axes)
        return _new_group(key, self._degrees) if key else None

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank. All ranks call it together."""
        if self.control is None:
            return value
        number = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(number, src=0, group=self.control)
        return int(number)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, on every rank. All ranks call it together."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def largest(self, value: int) -> int:
        """The largest of all ranks' values, on every rank. All ranks call it together."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: int, operation: dist.ReduceOp) -> int:
        if self.control is None:
            return value
        number = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(number, op=operation, group=self.control)
        return int(number)

    def _key(self, axes: Container[str]) -> tuple[str, ...]:
        """Those of the axes that have more than one rank, in the mesh's order."""
        return tuple(axis for axis, degree in self._degrees.items() if axis in axes and degree > 1)


def _place(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinates of a rank, the last one running fastest."""
    coordinates = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def _own_group(axes: tuple[str, ...], degrees: Mapping[str, int]) -> dist.ProcessGroup:
    """Form every group along some axes (all ranks must, in the same order) and give back this rank's.

    A group of all ranks is the world itself: each group of gloo has a thread for as long as it lives.
    """
    if math.prod(degrees[axis] for axis in axes) == dist.get_world_size():
        return dist.group.WORLD
    return _new_group(axes, degrees)


def _new_group(axes: tuple[str, ...], degrees: Mapping[str, int]) -> dist.ProcessGroup:
    sizes = tuple(degrees.values())
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        placed = zip(degrees, _place(rank, sizes), strict=True)
        members.setdefault(tuple(place for axis, place in placed if axis not in axes), []).append(rank)
    with patient_threads():
        groups = [(ranks, dist.new_group(ranks)) for ranks in members.values()]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)
