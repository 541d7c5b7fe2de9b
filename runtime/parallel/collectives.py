"""Collectives in the shape they are used in here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks of the group, of one shape, along a new first dim."""
    tensor = tensor.contiguous()
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    _all_gather(gathered.flatten(0, 1), tensor, group=group)
    return gathered


def complete(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill a buffer of which each rank of the group has filled one of the equal parts, by rank."""
    _all_gather(buffer, buffer.chunk(dist.get_world_size(group))[dist.get_rank(group)], group=group)


def all_gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What each rank of the group says, by rank; along the CPU."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    lengths = [int(length) for length in all_gather(torch.tensor([len(own)]), group)]
    parts = all_gather(F.pad(own, (0, max(lengths) - len(own))), group)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def pass_on(sent: torch.Tensor, received: torch.Tensor, *, group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to send a tensor to the next rank of the group and to receive one from the rank before; call the result to
    wait for both. Both are contiguous, and may have no elements.
    """
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    following, before = (rank + 1) % degree, (rank - 1) % degree
    if not _has_send(group):
        sizes_out, sizes_in = [0] * degree, [0] * degree
        sizes_out[following], sizes_in[before] = sent.numel(), received.numel()
        dist.all_to_all_single(received.view(-1), sent.view(-1), sizes_in, sizes_out, group=group)
        return lambda: None
    operations = [
        dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group)
        for operation, tensor, peer in ((dist.isend, sent, following), (dist.irecv, received, before))
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def _has_send(group: dist.ProcessGroup) -> bool:
    """Threads as ranks, which tests use, have every collective but no send and receive."""
    return dist.get_backend(group) != "threaded"
