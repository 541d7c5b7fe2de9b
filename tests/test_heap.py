"""Ranks on the processor have the C library use places of its heap again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from runtime.heap import TUNABLES, heap_environment
from runtime.inspection import inspect_model
from runtime.machine import CudaDevice, Machine
from runtime.plan import make_plan
from runtime.ranks import rank_environment
from runtime.settings import ParallelSettings

BLOCKS = """
import ctypes, random

library, draw = ctypes.CDLL(None), random.Random(0)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
library.mallopt(-3, 32 << 20)  # in the heap, and not in mappings of their own
library.mallopt(-1, 1 << 30)  # which is not given back meanwhile
token, small, held, most = 7077888, [], {}, 0


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d e f g h i j".split()]


def pieces():
    small.extend(library.malloc(draw.choice((24, 40, 56, 72, 88))) for _ in range(10))
    draw.shuffle(small)
    while len(small) > 60:
        library.free(small.pop())


def take(nbytes):
    global most
    place = ctypes.c_void_p()
    library.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(nbytes))
    held[place.value] = nbytes
    most = max(most, sum(held.values()))
    pieces()
    return place.value


def drop(*places):
    for place in places:
        del held[place]
        library.free(ctypes.c_void_p(place))
        pieces()


library.mallinfo2.restype = Info
before, stream = library.mallinfo2().arena, take(token)
for _ in range(12):
    joined, norm, scaled = take(token), take(token), take(token)
    drop(norm)
    normed = take(token)
    drop(scaled)
    wide, active = take(2 * token), take(2 * token)
    drop(wide)
    query = [take(token // 2) for _ in range(6)]
    output = take(token // 2)
    drop(*query)
    both, last = take(5 * token // 2), take(token)
    drop(both)
    added = take(token)
    drop(last, joined, normed, active, output, stream)
    stream = added
print((library.mallinfo2().arena - before) / most)
"""
"""What the blocks of a transformer ask of the heap, and the small pieces in between: how much it grows for what is held."""


def heap_of_blocks(environment: dict[str, str]) -> float:
    """How many times what is held at most the heap has grown to."""
    told = subprocess.run([sys.executable, "-c", BLOCKS], env=environment, capture_output=True, text=True, check=True)
    return float(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another")
def test_the_heap_grows_little_beyond_what_is_held():
    plain = {name: value for name, value in os.environ.items() if name != TUNABLES}
    untouched, chosen = heap_of_blocks(plain), heap_of_blocks(plain | heap_environment({}))
    print(f"the heap is {untouched:.2f} times what is held at most, with our choice {chosen:.2f}")
    assert chosen < min(1.8, untouched)


def test_ranks_on_the_processor_start_so_and_what_the_user_has_set_stands_last():
    facts, inherited = inspect_model("random:wan"), {TUNABLES: "glibc.malloc.perturb=1"}
    plans = [
        make_plan(ParallelSettings(devices=devices), facts, Machine(cuda=(CudaDevice("GPU", 81559),)))
        for devices in ("cpu:2", "cuda:0")
    ]
    on_cpu, on_gpu = (rank_environment(plan, inherited)[TUNABLES] for plan in plans)
    assert on_cpu.split(":")[0] == "glibc.malloc.tcache_count=0" and on_cpu.endswith(":glibc.malloc.perturb=1")
    assert on_gpu == inherited[TUNABLES]
