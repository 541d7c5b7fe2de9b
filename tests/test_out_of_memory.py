"""Memory that has run out is known as such, whoever says so, and told with values and a way out."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import __main__
from runtime.errors import Refused
from runtime.jobs import Job, death
from runtime.out_of_memory import in_words, is_out_of_memory
from runtime.protocol import Work
from runtime.settings import ModelSettings


class OutOfMemoryError(RuntimeError):
    """Named as torch's own."""


def refused_for(error):
    refusal = Refused("a file cannot be read")
    refusal.__cause__ = error
    return refusal


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:80] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("std::bad_alloc"), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (ImportError("No module named 'nothing'"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (refused_for(OSError(errno.ENOMEM, "Cannot allocate memory")), True),
        (RuntimeError("shapes differ"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (refused_for(OSError(errno.EIO, "Input/output error")), False),
        (Refused("the prompt speaks of an out of memory experience"), False),
    ],
    ids=repr,
)
def test_what_more_memory_would_have_avoided_is_told_from_the_rest(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_the_words_have_what_was_asked_for_and_ways_out_that_are_left():
    asked = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error 12")
    on_cpu = in_words(asked, device="cpu", offload="none")
    assert on_cpu.startswith("out of memory on cpu: tried to allocate 3.0 GiB; ")
    assert "of host memory are free" in on_cpu and on_cpu.endswith("a smaller batch or offload disk (Configure Memory)")
    assert "disk" not in in_words(MemoryError(), device="cpu", offload="disk")
    assert in_words(MemoryError(), device="cpu", offload="disk").startswith("out of memory on cpu: MemoryError; ")
    on_gpu = in_words(OutOfMemoryError("Tried to allocate 2.00 GiB"), device="cuda:1", offload="none")
    assert (
        "cuda:1: Tried to allocate 2.00 GiB. Use" in on_gpu and "offload layerwise (Configure Memory) or more" in on_gpu
    )


@pytest.mark.parametrize(("line", "is_one"), [("MemoryError", True), ("KeyError: 'x'", False)])
def test_a_rank_that_ended_before_it_could_tell_is_known_by_its_last_lines(line, is_one):
    job = Job(peer=b"", request=Work(job="a", model=ModelSettings(model="m")), frames=[])
    rank = SimpleNamespace(settings=SimpleNamespace(device_name="cpu", rank=1), last_lines=[line], exit_status=1)
    told = death(job, rank)
    assert told.out_of_memory is is_one and line in told.message


def test_a_command_under_a_limit_of_the_system_says_so_and_does_not_crash():
    program = (
        "import resource, sys; from runtime import __main__\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))\n"
        "class Hungry:\n"
        "    add_arguments = staticmethod(lambda parser: None)\n"
        "    run = staticmethod(lambda chosen: bytearray(1 << 40))\n"
        "Hungry.__doc__ = 'Eat.'\n"
        "__main__.COMMANDS = {'eat': Hungry}\n"
        "sys.exit(__main__.main(['eat']))"
    )
    root = Path(__main__.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: out of memory on cpu: MemoryError; " in done.stderr
    assert "a process may map 1.0 GiB (ulimit -v)" in done.stderr and done.stderr.endswith("or a higher ulimit\n")
