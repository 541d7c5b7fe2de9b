"""Memory that nothing refers to any more goes back to the system and to other programs."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

import torch
from torch import nn


def release_memory() -> None:
    """Collect what is left in cycles, and empty the caches of the allocators: torch's on a GPU, and the C library's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    give_back()


def give_back() -> None:
    """Have the C library return what is free to the system."""
    with suppress(AttributeError, OSError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def let_go(module: nn.Module) -> None:
    """Give back the memory of a module's tensors, although who has just used it may refer to it still."""
    module.to("meta")
    release_memory()
