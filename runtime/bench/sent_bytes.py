"""Bytes that leave a rank, counted where they are handed to the process group."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """While it is entered, counts in `total` what this rank sends to the others of its one group.

    A collective counts as what the best algorithm for it sends: an all-reduce is a reduce-scatter and an all-gather.
    What ranks say to each other about a job (a barrier, a number that they agree on) is not counted.
    """

    def __init__(self, *, rank: int, degree: int) -> None:
        super().__init__()
        self.total, self._rank, self._degree = 0, rank, degree

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.total += self._sent(function.__name__.partition(".")[0], args)
        return function(*args, **(kwargs or {}))

    def _sent(self, name: str, args: tuple) -> int:
        others = self._degree - 1
        match name:
            case "send":
                return sum(tensor.nbytes for tensor in args[0])
            case "alltoall_base_":
                tensor, splits = args[1], args[4] or [len(args[1]) // self._degree] * self._degree
                row = tensor[:1].nbytes if len(tensor) else 0
                return (len(tensor) - splits[self._rank]) * row
            case "_allgather_base_":
                return others * args[1].nbytes
            case "allreduce_":
                return sum(2 * others * each.nbytes // self._degree for each in args[0] if each.numel() > 1)
            case "recv_" | "barrier" | "broadcast_":
                return 0
        raise RuntimeError(f"{name} is not counted yet")
