"""The truce over memory, on a stand-in for ComfyUI; `test_comfy_memory` has the real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

MIB = 1 << 20


def report(pack, *, devices=("cuda:0", "cuda:1"), device_mib=0, host_mib=0, room_mib=0):
    """A sidecar with one model on each device."""
    protocol = pack.runtime_protocol
    settings = pack.runtime_settings.ModelSettings(model="/m/wan.safetensors")
    held = protocol.HeldModel(model=settings, device_bytes=device_mib * MIB, host_bytes=host_mib * MIB)
    memory = protocol.Memory(models=(held,) if device_mib or host_mib else ())
    ranks = [protocol.RankReport(rank=n, pid=1, device=d, memory=memory) for n, d in enumerate(devices)]
    return protocol.Report(pid=1, ranks=tuple(ranks), devices=devices, room=dict.fromkeys(devices, room_mib * MIB))


@pytest.fixture
def stand_in(pack):
    """Made for ComfyUI's device, with a list of how often everything was let go of."""

    def make(device="cuda:0", *, busy=False):
        pack.fake.device = device
        made = pack.truce.StandIn(lambda: freed.append(not busy) or not busy)
        return SimpleNamespace(it=made, freed=freed)

    freed: list[bool] = []
    return make


def test_comfyui_is_asked_for_the_room_of_what_is_still_to_be_loaded_on_its_device(pack, stand_in):
    made = stand_in().it
    sizes = []
    pack.fake.held = SimpleNamespace(extend=None)
    pack.host.comfy.model_management.load_models_gpu = lambda models: sizes.append(
        (models[0].model_size(), models[0].loaded_size())
    )
    made.make_room(report(pack, room_mib=10))
    made.make_room(report(pack, device_mib=10))
    made.make_room(report(pack, devices=("cuda:2",), room_mib=10))
    assert sizes == [(10 * MIB, 0), (20 * MIB, 20 * MIB), (0, 0)]
    assert made.model_size() == made.loaded_size() == 0


def test_letting_go_frees_everything_once_and_moving_in_the_list_frees_nothing(pack, stand_in):
    made = stand_in()
    made.it.note(report(pack, device_mib=10, host_mib=5))
    assert made.it.loaded_size() == 30 * MIB
    made.it.detach(unpatch_all=False)
    assert made.freed == [] and made.it.loaded_size() == 30 * MIB
    made.it.detach()
    assert made.freed == [True] and made.it.loaded_size() == 0


def test_what_is_loaded_counts_where_it_is_whatever_devices_the_next_model_is_planned_for(pack, stand_in):
    made = stand_in("cuda:0").it
    there = report(pack, devices=("cuda:1", "cuda:2"), device_mib=10)
    made.note(there.model_copy(update={"devices": ("cuda:0",)}))
    assert made.loaded_size() == 20 * MIB
    assert made.partially_unload("cpu", 4 * MIB) == 4 * MIB  # nothing of it is on ComfyUI's device


def test_no_bytes_are_called_freed_while_a_job_runs(pack, stand_in):
    made = stand_in(busy=True)
    made.it.note(report(pack, device_mib=10))
    assert made.it.partially_unload("cpu", 4 * MIB) == 0
    assert made.freed == [False] and made.it.loaded_size() == 20 * MIB


def test_what_would_give_comfyuis_device_nothing_is_left_loaded(pack, stand_in):
    made = stand_in("cuda:5")
    made.it.note(report(pack, device_mib=10))
    assert made.it.partially_unload("cpu", 4 * MIB) == 4 * MIB and made.freed == []
    here = stand_in("cuda:1")
    here.it.note(report(pack, device_mib=10))
    assert here.it.partially_unload("cpu", 4 * MIB) == 10 * MIB and here.freed == [True]


@pytest.mark.parametrize(
    ("devices", "sizes", "line"),
    [
        ((), {}, ""),
        (("cpu",), {"host_mib": 24}, "memory: wan.safetensors 24.0 MiB of host memory"),
        (("cuda:0", "cuda:1"), {"device_mib": 1536, "host_mib": 2}, "each of 2 ranks: wan.safetensors 1.5 GiB and 2.0 MiB of host memory"),
        (("cuda:0",), {}, "memory: no model"),
    ],
)  # fmt: skip
def test_memory_in_a_line(pack, devices, sizes, line):
    assert report(pack, devices=devices, **sizes).memory == line


def test_ranks_that_hold_different_amounts_are_told_one_by_one(pack):
    one, two = report(pack, devices=("cuda:0",), device_mib=1), report(pack, devices=("cuda:1",), device_mib=2)
    second = two.ranks[0].model_copy(update={"rank": 1})
    both = one.model_copy(update={"ranks": (*one.ranks, second)})
    assert both.memory == "rank 0: wan.safetensors 1.0 MiB; rank 1: wan.safetensors 2.0 MiB"
