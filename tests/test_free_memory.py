"""How much memory is free: by what the system says, and by the limits of the control groups around this process."""

from __future__ import annotations

import os

import pytest

from runtime import host_memory

MIB = 1 << 20
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
SECOND = ("memory.max", "memory.current", "inactive_file")
UNLIMITED = {FIRST: str((1 << 63) - 4096), SECOND: "max"}


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system of control groups, with 1000 MiB in the machine: the groups in which this process is, and their files."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {1000 * 1024} kB\n")
    for name, place in (("MEMINFO", "meminfo"), ("CGROUP", "groups"), ("OWN_CGROUP", "own")):
        monkeypatch.setattr(host_memory, name, tmp_path / place)

    def make(own, groups):
        (tmp_path / "own").write_text(own)
        for place, (names, limit, used, cache) in groups.items():
            folder = tmp_path / "groups" / place
            folder.mkdir(parents=True, exist_ok=True)
            limit = UNLIMITED[names] if limit is None else str(limit * MIB)
            for name, text in zip(names, (limit, str(used * MIB)), strict=False):
                (folder / name).write_text(text + "\n")
            (folder / "memory.stat").write_text(f"cache 1\n{names[2]} {cache * MIB}\n")

    return make


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        ("", {}, 1000),
        ("0::/a/b\n", {"a/b": (SECOND, 500, 200, 50)}, 350),
        ("0::/a/b\n", {"a/b": (SECOND, None, 200, 50)}, 1000),
        ("0::/a/b\n", {"a/b": (SECOND, None, 200, 50), "a": (SECOND, 300, 290, 0)}, 10),
        ("0::/\n", {".": (SECOND, 400, 100, 0)}, 300),
        ("4:memory:/a\n0::/\n", {"memory/a": (FIRST, 600, 500, 20)}, 120),
        ("4:cpu,memory:/a\n", {"memory/a": (FIRST, None, 500, 20), "memory": (FIRST, 700, 600, 0)}, 100),
        ("4:memory:/docker/1234\n", {"memory": (FIRST, 250, 100, 0)}, 150),
        ("4:memory:/a\n", {"memory/a": (FIRST, None, 10, 0)}, 1000),
        ("4:memory:/a\n", {"memory/a": (FIRST, 100, 200, 0)}, 0),
        ("3:cpuset:/a\n", {"memory/a": (FIRST, 100, 20, 0)}, 1000),
    ],
)
def test_what_is_free_is_the_least_that_machine_and_groups_leave(system, own, groups, free):
    system(own, groups)
    assert host_memory.free_host_bytes() == free * MIB


def test_ranks_that_let_go_make_room_and_what_is_not_known_bounds_nothing(system, monkeypatch, tmp_path):
    system("4:memory:/a\n", {"memory/a": (FIRST, 600, 500, 20)})
    assert host_memory.HostMemory.here(freed=MIB).free == 121 * MIB
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "nothing")
    assert host_memory.HostMemory.here().free is None
    assert host_memory.resident_bytes(2**22 + 1) == host_memory.Resident()


def test_what_a_process_has_in_memory_is_its_own_shared_or_of_files():
    here = host_memory.resident_bytes(os.getpid())
    assert MIB < here.own < here.all and here.own + here.shared <= here.all


def test_here_some_memory_is_free():
    assert host_memory.free_host_bytes() > MIB
