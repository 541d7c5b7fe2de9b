"""How much memory is free on a device now."""

from __future__ import annotations

import torch

from .host_memory import free_host_bytes


def free_bytes(device: torch.device) -> int:
    """What is free on a device now, for this process; 0 where that is not known."""
    if device.type != "cuda":
        return free_host_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
