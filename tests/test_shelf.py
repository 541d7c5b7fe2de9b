"""The shelf of loaded models: what makes room, in which order, and alike on every rank."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from runtime import shelf as shelf_module
from runtime.mesh import Mesh
from runtime.rank_settings import KeepSettings, limit_of
from runtime.settings import LoraSettings, MemorySettings, ModelSettings, ParallelSettings
from runtime.shelf import Shelf
from runtime.weighing import Bytes, weigh
from tests.ranks import run_as_threads

MIB = 1 << 20


def model(name: str, ranks: int = 1) -> ModelSettings:
    return ModelSettings(model=name, parallel=ParallelSettings(devices=f"cpu:{ranks}", cfg=ranks))


def shelf_of(keep: KeepSettings, mesh: Mesh = Mesh.single()) -> Shelf:
    return Shelf(keep, world=mesh.world, device=mesh.device)


def put(shelf: Shelf, name: str, size: int, *, device: int = 0, mesh: Mesh = Mesh.single()) -> None:
    """Load a model of so many MiB, as a pipeline would."""
    held = Bytes(device=device * MIB, host=size * MIB)
    assert shelf.take(model(name, mesh.world), mesh=mesh) is None
    shelf.make_room(held, mesh=mesh)
    shelf.put(model(name, mesh.world), SimpleNamespace(held=held, changed=""))


def names(shelf: Shelf) -> str:
    return "".join(settings.model for settings in shelf.held())


def test_models_stay_until_the_limit_and_the_one_used_longest_ago_makes_room():
    shelf = shelf_of(KeepSettings(host="100MB"))
    for name in "abc":
        put(shelf, name, 30)
    assert (
        names(shelf) == "abc"
        and shelf.take(model("a"), mesh=Mesh.single()) is not None
        and shelf.take(model("z"), mesh=Mesh.single()) is None
    )
    put(shelf, "d", 20)
    assert names(shelf) == "cad"  # b was used longest ago
    put(shelf, "e", 75)
    assert names(shelf) == "de"
    put(shelf, "f", 500)
    assert names(shelf) == "f"  # what is in use is kept whatever it takes
    put(shelf, "g", 1)
    assert names(shelf) == "g"


def test_a_part_of_the_model_in_use_has_others_make_room_and_never_that_model_itself():
    shelf = shelf_of(KeepSettings(host="100MB"))
    for name in "abc":
        put(shelf, name, 30)
    shelf.make_room(Bytes(host=10 * MIB), mesh=Mesh.single())
    assert names(shelf) == "abc"
    shelf.make_room(Bytes(host=30 * MIB), mesh=Mesh.single())
    assert names(shelf) == "bc"
    shelf.make_room(Bytes(host=500 * MIB), mesh=Mesh.single())
    assert names(shelf) == "c"
    shelf._pipelines[model("c")].changed = "c has been written to"  # the next prompt will see
    shelf.make_room(Bytes(host=500 * MIB), mesh=Mesh.single())
    assert names(shelf) == "c"


@pytest.mark.parametrize(
    ("amount", "kept"), [("0", "c"), ("0.5", "abc"), ("0.2", "bc"), ("auto", "abc"), ("15MB", "c")]
)
def test_a_limit_may_be_a_part_of_what_is_free_without_the_models(monkeypatch, amount, kept):
    total, shelf = 100 * MIB, shelf_of(KeepSettings(host=amount))
    monkeypatch.setattr(shelf_module, "free_bytes", lambda device: total - sum(shelf.held().values(), Bytes()).host)
    for name in "abc":
        put(shelf, name, 10)
    assert names(shelf) == kept


def test_a_model_that_makes_room_is_gone_when_memory_is_released(monkeypatch):
    shelf, gone = shelf_of(KeepSettings(host="10MB")), []
    put(shelf, "a", 10)
    tensor = shelf.take(model("a"), mesh=Mesh.single()).weight = torch.zeros(1)
    left, tensor = weakref.ref(tensor), None
    monkeypatch.setattr(shelf_module, "release_memory", lambda: gone.append(left() is None))
    put(shelf, "b", 10)
    assert gone == [True]


def test_a_gpu_has_a_limit_of_its_own(monkeypatch):
    shelf = shelf_of(KeepSettings(device="20MB", host="1GB"), Mesh.single("cuda:0"))
    monkeypatch.setattr(shelf_module, "free_bytes", lambda device: 1 << 40)
    put(shelf, "a", 100, device=15)
    put(shelf, "b", 100, device=4)
    assert names(shelf) == "ab"
    put(shelf, "c", 100, device=2)
    assert names(shelf) == "bc"


def test_ranks_with_different_memory_let_go_of_the_same_models(monkeypatch):
    free = {0: 1000 * MIB, 1: 62 * MIB}
    monkeypatch.setattr(shelf_module, "free_bytes", lambda device: free[torch.distributed.get_rank()])

    def work(mesh: Mesh) -> str:
        shelf = shelf_of(KeepSettings(host="0.5"), mesh)
        for name in "abcd":
            put(shelf, name, 15, mesh=mesh)
        return names(shelf)

    first, second = run_as_threads({"cfg": 2}, work)
    assert first == second == "bcd"


@pytest.mark.parametrize(
    ("degrees", "kept"), [({"cfg": 2}, "bcd"), ({"tensor": 2}, "d"), ({"cfg": 2, "tensor": 2}, "d")]
)
def test_what_ranks_hold_once_counts_once_and_what_each_has_of_its_own_for_each(degrees, kept):
    """Of 50 MiB for the machine, with models of which a rank holds 15, each of them or what it shares with others."""

    def work(mesh: Mesh) -> str:
        shelf = shelf_of(KeepSettings(host="50MB"), mesh)
        for name in "abcd":
            held = Bytes(host=15 * MIB)
            loaded = ModelSettings(model=name, parallel=ParallelSettings(devices=f"cpu:{mesh.world}", **degrees))
            assert shelf.take(loaded, mesh=mesh) is None
            shelf.make_room(held, mesh=mesh)
            shelf.put(loaded, SimpleNamespace(held=held, changed=""))
        return names(shelf)

    assert set(run_as_threads(degrees, work)) == {kept}


def test_a_model_that_one_rank_let_go_of_while_it_ran_alone_is_loaded_on_all_again():
    def work(mesh: Mesh) -> tuple[bool, str]:
        shelf = shelf_of(KeepSettings(host="50MB"), mesh)
        for name in "ab":
            put(shelf, name, 20, mesh=mesh)
        if mesh.rank == 0:
            put(shelf, "c", 20)
        return shelf.take(model("a", 2), mesh=mesh) is None, names(shelf)

    assert run_as_threads({"cfg": 2}, work) == [(True, "bc"), (True, "b")]


def test_a_model_whose_file_has_changed_for_one_rank_is_loaded_on_all_again():
    def work(mesh: Mesh) -> tuple[bool, str]:
        shelf = shelf_of(KeepSettings(host="50MB"), mesh)
        for name in "ab":
            put(shelf, name, 20, mesh=mesh)
        assert shelf.take(model("a", 2), mesh=mesh) is not None
        shelf._pipelines[model("a", 2)].changed = "a has been written to" if mesh.rank else ""
        return shelf.take(model("a", 2), mesh=mesh) is None, names(shelf)

    assert run_as_threads({"cfg": 2}, work) == [(True, "b")] * 2


def test_a_model_whose_file_has_changed_is_gone_with_the_next_that_is_loaded():
    shelf = shelf_of(KeepSettings(host="100MB"))
    for name in "ab":
        put(shelf, name, 20)
    shelf._pipelines[model("a")].changed = "a has been replaced by another file"
    put(shelf, "c", 20)
    assert names(shelf) == "bc"


def test_ranks_let_go_of_the_same_models_where_the_first_has_others_too():
    """The first has loaded c alone and used it last but longest ago of what is to go; a needs no more room on the others."""

    def work(mesh: Mesh) -> str:
        shelf = shelf_of(KeepSettings(host="50MB"), mesh)
        if mesh.rank == 0:
            put(shelf, "c", 10)
        for name in "ab":
            put(shelf, name, 15, mesh=mesh)
        put(shelf, "d", 12, mesh=mesh)
        put(shelf, "e", 20, mesh=mesh)
        return names(shelf)

    assert run_as_threads({"cfg": 2}, work) == ["bde", "bde"]


def test_others_keep_what_the_first_rank_has():
    shelf = shelf_of(KeepSettings(host="100MB"))
    for name in "abc":
        put(shelf, name, 20)
    shelf.keep([model("c"), model("a"), model("z")])
    assert names(shelf) == "ac"


def test_what_comes_later_is_not_part_of_what_is_loaded_and_the_rest_is():
    later = {
        "loras": (LoraSettings(path="/x"),),
        "parallel": ParallelSettings(devices="cpu:2"),
        "memory": MemorySettings(text_encoder_device="cpu", vae_device="on-demand"),
        "tokenizers": "/comfy",
        **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3", "vae"), "/part"),
    }
    assert ModelSettings(model="a", **later).weights == ModelSettings(model="a").weights
    others = {}, {"dtype": "bf16"}, {"quant": "fp8"}, {"stamp": "1"}, {"memory": MemorySettings(offload="disk")}
    assert len({ModelSettings(model="a", **other).weights for other in others}) == len(others)


@pytest.mark.parametrize(
    ("amount", "limit"), [("auto", 700), ("0.25", 250), ("1.0", 1000), ("2KB", 2048), ("1.5MiB", 1536 * 1024), ("0", 0)]
)
def test_amounts(amount, limit):
    assert limit_of(amount, free=1000) == limit


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "lots"}, "OUTRIGGER_KEEP_DEVICE 'lots' is not one of: auto, a part"),
        ({"host": "-1"}, "OUTRIGGER_KEEP_HOST '-1'"),
        ({"prompts": "auto"}, "OUTRIGGER_KEEP_PROMPTS 'auto' is not one of: an amount"),
        ({"device": "1"}, "OUTRIGGER_KEEP_DEVICE '1' is not one of: auto, a part such as 0.5 .1.0 for all"),
        ({"host": "١٢GB"}, "OUTRIGGER_KEEP_HOST '١٢GB' is not one of"),
        ({"host": "0.٥"}, "OUTRIGGER_KEEP_HOST '0.٥' is not one of"),
        ({"prompts": "²MB"}, "OUTRIGGER_KEEP_PROMPTS '²MB' is not one of"),
        ({"idle_minutes": "١٢"}, "OUTRIGGER_IDLE_MINUTES '١٢' is not a number of minutes such as 60"),
        ({"idle_minutes": "1e3"}, "OUTRIGGER_IDLE_MINUTES '1e3' is not a number of minutes such as 60"),
        ({"idle_minutes": -1.0}, "greater than or equal to 0"),
        ({"idle_minutes": "1000001"}, "less than or equal to 1000000"),
    ],
)
def test_what_is_no_amount_is_refused_by_the_name_of_its_variable(fields, words):
    with pytest.raises(ValueError, match=words):
        KeepSettings(**fields)


def test_settings_come_from_the_environment():
    variables = {"OUTRIGGER_KEEP_HOST": "2GB", "OUTRIGGER_IDLE_MINUTES": "0.5", "OUTRIGGER_KEEP_DEVICE": ""}
    assert KeepSettings.from_environment(variables) == KeepSettings(host="2GB", idle_minutes=0.5)
    assert KeepSettings.from_environment(variables, host="0").host == "0"
    assert KeepSettings.from_environment({"OUTRIGGER_IDLE_MINUTES": "1000000"}).idle_minutes == 1e6


def test_memory_that_modules_share_counts_once_and_what_is_in_no_memory_not_at_all():
    first, second = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(8, 4)
    second.weight = first.weight
    assert weigh([first, second, torch.nn.Linear(9, 9, device="meta")]) == Bytes(host=8 * 4 * 4 + 4 * 4)
