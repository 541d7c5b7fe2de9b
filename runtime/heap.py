"""How the C library of a rank keeps memory that is free: so that the next tensor fits where the last one was.

Tensors on the processor lie in glibc's heap. A piece of some bytes that a thread keeps at hand, freed beside a tensor,
holds that place back from a tensor of the same size, and a rank grew by half of what a step works with. Without such pieces
(`tcache_count`) freed places join again. See "Memory Allocation Tunables" in glibc's manual.
"""

from __future__ import annotations

from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
CHOSEN = "glibc.malloc.tcache_count=0"


def heap_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variable that the C library reads when a program starts; what the user has set there stands last, and counts."""
    return {TUNABLES: ":".join([CHOSEN, *filter(None, [inherited.get(TUNABLES)])])}
