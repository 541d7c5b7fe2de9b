"""Degrees -> named axes -> process groups. Everything below takes a group, never the world."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

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
        groups: Mapping[str, dist.ProcessGroup] | None = None,
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
    def of_world(cls, degrees: Mapping[str, int], *, device: torch.device | str) -> Mesh:
        """The mesh over the ranks of the default process group, which all call this together.

        Raises `ValueError` when the product of the degrees is not their number.
        """
        device, rank = torch.device(device), dist.get_rank()
        if math.prod(degrees.values()) != dist.get_world_size():
            raise ValueError(f"{dict(degrees)} is not a mesh of {dist.get_world_size()} ranks")
        groups = {axis: _own_group(axis, degrees) for axis, degree in degrees.items() if degree > 1}
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

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axis` alone; None when it is the only one."""
        return self._groups.get(axis)

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank. All ranks call it together."""
        if self.control is None:
            return value
        number = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(number, src=0, group=self.control)
        return int(number)


def _place(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinates of a rank, the last one running fastest."""
    coordinates = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def _own_group(axis: str, degrees: Mapping[str, int]) -> dist.ProcessGroup:
    """Form every group along an axis (all ranks must, in the same order) and give back this rank's.

    An axis of all ranks is the world itself: each group of gloo wakes a hundred times a second for as long as it lives.
    """
    if degrees[axis] == dist.get_world_size():
        return dist.group.WORLD
    axes, sizes = list(degrees), tuple(degrees.values())
    ranks = {_place(rank, sizes): rank for rank in range(math.prod(sizes))}
    position, own = axes.index(axis), None
    for others in itertools.product(*(range(size) for place, size in enumerate(sizes) if place != position)):
        members = [ranks[(*others[:position], place, *others[position:])] for place in range(sizes[position])]
        group = dist.new_group(members)
        if dist.get_rank() in members:
            own = group
    return own
