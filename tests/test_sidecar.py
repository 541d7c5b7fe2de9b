"""Requests through real processes: client, server and ranks, with a pipeline that only pretends."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch

from runtime.__main__ import main
from runtime.client import Sidecar
from runtime.errors import SidecarError
from runtime.folders import SHARED_MEMORY
from runtime.protocol import (
    Check,
    Decode,
    Decoded,
    Encoded,
    EncodedPixels,
    EncodePixels,
    EncodeText,
    Notice,
    Progress,
    Sampled,
)
from runtime.settings import LoraSettings, MemorySettings, ModelSettings
from tests.sidecars import (
    FAKE_SERVER,
    fake_sidecar,
    family_of,
    never,
    processor_seconds,
    rank_pids,
    run,
    sample,
    steps_of,
)

needs_shared_memory = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this system has no /dev/shm")
LARGE = (1, 16, 512, 512)
"""16 MiB."""


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def sidecar(lines):
    with fake_sidecar(log=lines.append) as running:
        yield running


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_gives_every_step_and_then_its_result(sidecar, ranks):
    request = sample("fake?step=0.02", ranks=ranks, steps=4)
    events = run(sidecar, request)
    assert steps_of(events) == [1, 2, 3, 4]
    assert isinstance(events[-1], Sampled) and torch.equal(events[-1].latent, request.latent * 2)
    assert len(rank_pids(sidecar)) >= ranks


def test_a_check_gives_the_plan_and_starts_nothing():
    request = sample(ranks=2)
    fields = {name: getattr(request, name) for name in type(request).model_fields if name != "kind"}
    with fake_sidecar() as sidecar:
        (planned,) = run(sidecar, Check(**fields))
        assert (planned.kind, planned.job) == ("planned", request.job)
        assert sidecar.status().ranks == ()
        assert isinstance(run(sidecar, request)[-1], Sampled)


def test_previews_come_with_their_step(sidecar):
    events = run(sidecar, sample(steps=5, preview="latent2rgb"))
    seen = [
        (event.step, int(event.preview[0, 0, 0])) for event in events if getattr(event, "preview", None) is not None
    ]
    assert seen == [(step, step) for step in range(1, 6)]


def test_a_warm_job_keeps_ranks_and_weights(sidecar, lines):
    run(sidecar, sample(ranks=2))
    before, loads = rank_pids(sidecar), sum("loaded" in line for line in lines)
    events = run(sidecar, sample(ranks=2))
    assert not steps_of(events, "loading") and not steps_of(events, "starting ranks")
    assert rank_pids(sidecar) == before and sum("loaded" in line for line in lines) == loads


def test_other_loras_load_nothing_and_are_told_of_once_by_the_first_rank(sidecar, lines):
    request = sample("fake-loras", ranks=2)
    run(sidecar, request)
    lines.clear()
    for strength in (1.0, -0.5):
        lora = LoraSettings(path="/loras/style.safetensors", strength=strength)
        model = request.model.model_copy(update={"loras": (lora,)})
        events = run(sidecar, request.model_copy(update={"model": model, "job": uuid.uuid4().hex}))
        assert [each.text for each in events if isinstance(each, Notice)] == [f"/loras/style.safetensors at {strength}"]
        assert isinstance(events[-1], Sampled)
    assert not [line for line in lines if "loaded" in line]


def test_other_parts_elsewhere_load_no_model_and_are_refused_where_they_are_not(sidecar):
    request = sample("fake-parts", ranks=2)
    run(sidecar, request)
    for other in ({"vae": "/other"}, {"memory": MemorySettings(text_encoder_device="cpu", vae_device="on-demand")}):
        model = request.model.model_copy(update=other)
        events = run(sidecar, request.model_copy(update={"model": model, "job": uuid.uuid4().hex}))
        assert isinstance(events[-1], Sampled) and not steps_of(events, "loading")
    bad = request.model.model_copy(update={"vae": "bad"})
    with pytest.raises(ValueError, match="no such VAE"):
        run(sidecar, request.model_copy(update={"model": bad, "job": uuid.uuid4().hex}))
    assert not steps_of(run(sidecar, sample("fake-parts", ranks=2)), "loading")


def test_another_model_is_loaded_by_the_same_ranks(sidecar):
    run(sidecar, sample("fake?a=1", ranks=2))
    before = rank_pids(sidecar)
    assert steps_of(run(sidecar, sample("fake?a=2", ranks=2)), "loading")
    assert rank_pids(sidecar) == before


def test_a_plan_of_more_ranks_replaces_them(sidecar):
    run(sidecar, sample(ranks=2))
    before = [psutil.Process(pid) for pid in rank_pids(sidecar)]
    assert steps_of(run(sidecar, sample(ranks=3)), "starting ranks")
    assert len(rank_pids(sidecar)) == 3 and not any(process.is_running() for process in before)


def test_one_rank_is_the_first_of_those_that_run_and_what_both_have_loaded_stays(sidecar):
    run(sidecar, sample("fake?both", ranks=2))
    before = rank_pids(sidecar)
    assert steps_of(run(sidecar, sample("fake?both", ranks=1)), "loading")
    for ranks in (2, 1, 2):
        events = run(sidecar, sample("fake?both", ranks=ranks))
        assert steps_of(events) == [1, 2, 3] and not steps_of(events, "loading")
    assert rank_pids(sidecar) == before
    held = [[model.model.parallel.product for model in rank.memory.models] for rank in sidecar.status().ranks]
    assert sorted(held[0]) == [1, 2] and held[1] == [2]


def test_text_and_pictures_cross_too(sidecar):
    model, job = ModelSettings(model="fake"), uuid.uuid4().hex
    encoded = run(sidecar, EncodeText(job=job, model=model, text="four"))[-1]
    assert isinstance(encoded, Encoded) and encoded.conditioning.embedding.dtype == torch.bfloat16
    assert (encoded.conditioning.embedding == 4).all()
    decoded = run(sidecar, Decode(job=uuid.uuid4().hex, model=model, latent=torch.ones(7, 3)))[-1]
    assert isinstance(decoded, Decoded) and decoded.images.shape == (21,)
    pixels = run(sidecar, EncodePixels(job=uuid.uuid4().hex, model=model, pixels=torch.ones(2, 3)))[-1]
    assert isinstance(pixels, EncodedPixels) and pixels.latent.shape == (6,)


def test_a_prompt_is_in_no_log(sidecar, lines):
    run(sidecar, EncodeText(job=uuid.uuid4().hex, model=ModelSettings(model="fake"), text="a secret garden"))
    assert not any("secret" in line for line in lines)


@needs_shared_memory
def test_large_tensors_use_the_same_segments_each_time(sidecar):
    folder = sidecar._pool._folder
    for _ in range(6):
        request = sample(ranks=2, shape=LARGE)
        assert torch.equal(run(sidecar, request)[-1].latent, request.latent * 2)
    assert len(sidecar._pool.names()) == 1
    assert len([path for path in folder.iterdir() if path.name != "lock"]) == 2


@needs_shared_memory
def test_results_that_are_kept_stay_as_they_are(sidecar):
    kept = [run(sidecar, sample(f"fake?{number}", shape=LARGE))[-1].latent for number in range(3)]
    assert all(torch.equal(latent, kept[0]) for latent in kept)
    assert len({latent.data_ptr() for latent in kept}) == 3


def test_calls_from_several_threads_run_one_after_another(sidecar):
    results = {}

    def one(number):
        request = sample("fake?step=0.01", shape=(number, 2))
        results[number] = torch.equal(run(sidecar, request)[-1].latent, request.latent * 2)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(1, 5), True)


def test_the_server_never_loads_torch(sidecar):
    run(sidecar, sample())
    maps = Path(f"/proc/{sidecar.status().pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not list a process's libraries")
    assert "libtorch" not in maps.read_text()
    assert "libtorch" in Path(f"/proc/{rank_pids(sidecar)[0]}/maps").read_text()


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_idle_sidecar_uses_no_processor_time(sidecar, ranks):
    run(sidecar, sample(ranks=ranks))
    time.sleep(1)
    processes = family_of(sidecar)
    before = processor_seconds(processes)
    time.sleep(10)
    assert len(processes) == 1 + ranks and (processor_seconds(processes) - before) / 10 < 0.005


@pytest.mark.alone
def test_a_warm_job_adds_little_to_its_sampling(sidecar):
    run(sidecar, sample("fake?step=0.01"))
    added = []
    for _ in range(5):
        started = time.perf_counter()
        result = run(sidecar, sample("fake?step=0.01"))[-1]
        added.append(time.perf_counter() - started - result.seconds)
    assert min(added) < 0.05


@pytest.mark.parametrize("limit", ["0", str(1 << 20)])
def test_without_room_in_shared_memory_frames_are_used_and_the_user_is_told_once(monkeypatch, limit):
    monkeypatch.setenv("OUTRIGGER_POOL_BYTES", limit)
    logged = []
    with fake_sidecar(log=logged.append) as small:
        request = sample(shape=LARGE)
        events = run(small, request)
        assert torch.equal(events[-1].latent, request.latent * 2)
        said = [event.text for event in events if isinstance(event, Notice)]
        assert len(said) == 2 and all("shared memory" in text for text in said)  # the way in, the way out
        assert sum("shared memory has no room" in line for line in logged) == 2
        assert not [event for event in run(small, sample(shape=LARGE)) if isinstance(event, Notice)]


def test_a_result_outlives_its_sidecar():
    with fake_sidecar() as short_lived:
        request = sample(shape=LARGE)
        latent = run(short_lived, request)[-1].latent
    assert torch.equal(latent, request.latent * 2)


def test_over_loopback_it_is_the_same():
    with fake_sidecar(server=(*FAKE_SERVER, "tcp://127.0.0.1:*")) as on_loopback:
        request = sample(ranks=2, shape=LARGE)
        assert torch.equal(run(on_loopback, request)[-1].latent, request.latent * 2)


def test_two_sidecars_side_by_side_do_not_mix(sidecar):
    with fake_sidecar() as other:
        results = []
        first = sidecar.call(sample("fake?step=0.05", shape=(2,)), interrupted=never)
        second = other.call(sample("fake?step=0.05", shape=(3,)), interrupted=never)
        for event in (*first, *second):
            if not isinstance(event, (Progress, Notice)):
                results.append(tuple(event.latent.shape))
        assert results == [(2,), (3,)]
        assert not {p.pid for p in family_of(sidecar)} & {p.pid for p in family_of(other)}
    assert sidecar.alive and run(sidecar, sample())


ODD = [
    ("KEEP_DEVICE", "1"),
    ("KEEP_HOST", "١٢GB"),
    ("KEEP_PROMPTS", "auto"),
    ("IDLE_MINUTES", "²"),
    ("POOL_BYTES", "١٢"),
    ("POOL_BYTES", "²"),
    ("POOL_BYTES", "9" * 5000),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_a_variable_with_an_odd_value_is_refused_in_words_where_a_sidecar_is_to_start(monkeypatch, capsys, name, value):
    monkeypatch.setenv(f"OUTRIGGER_{name}", value)
    with pytest.raises(ValueError, match=f"^OUTRIGGER_{name} '{value[:3]}.* is not (one of|a number of)") as refusal:
        Sidecar.start(log=print, command=("no-such-program",))
    assert len(str(refusal.value)) < 200
    assert main(["serve"]) == 1 and f"OUTRIGGER_{name}" in capsys.readouterr().err


def test_status_in_the_midst_of_a_call_tells_of_it_and_the_call_goes_on(sidecar):
    request, seen = sample("fake?step=0.1", steps=4), []
    for event in sidecar.call(request, interrupted=lambda: bool(sidecar.status().pid) and False):
        seen.append(event)
        if steps_of([event]) == [1]:
            assert sidecar.status().busy == request.job and sidecar.free() is None
    assert steps_of(seen) == [1, 2, 3, 4] and torch.equal(seen[-1].latent, request.latent * 2)


def test_a_call_within_a_call_of_the_same_thread_is_refused_at_once(sidecar):
    for event in sidecar.call(sample("fake?step=0.1"), interrupted=never):
        if steps_of([event]) == [1]:
            with pytest.raises(SidecarError, match="a call of this thread is under way"):
                run(sidecar, sample())
    assert run(sidecar, sample())


def test_status_of_another_thread_waits_for_the_call_to_end(sidecar):
    told = []
    for event in sidecar.call(sample("fake?step=0.1"), interrupted=never):
        if steps_of([event]) == [1]:
            asking = threading.Thread(target=lambda: told.append(sidecar.status().busy))
            asking.start()
        assert not told
    asking.join(30)
    assert told == [""]


def test_a_sidecar_can_be_closed_in_the_midst_of_a_call():
    with fake_sidecar() as doomed:
        with pytest.raises(SidecarError, match="has ended"):
            for event in doomed.call(sample("fake?step=0.1"), interrupted=never):
                if steps_of([event]) == [1]:
                    started = time.monotonic()
                    doomed.close()
        assert time.monotonic() - started < 5
