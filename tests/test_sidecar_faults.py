"""A fault stays small: one clear error, in seconds, and the next prompt works."""

from __future__ import annotations

import os
import signal
import time
import uuid
from types import SimpleNamespace

import msgpack
import psutil
import pytest
import torch

from runtime.channel import Connection, encode, parse
from runtime.errors import SidecarError
from runtime.jobs import Job, death
from runtime.plan import Plan
from runtime.protocol import Decode, EncodeText, Failed, Hello, Status, Welcome, event_from
from runtime.rank_settings import KeepSettings
from runtime.ranks import Ranks
from runtime.settings import LoraSettings, ModelSettings, ParallelSettings
from tests.sidecars import fake_sidecar, family_of, never, rank_pids, run, sample, steps_of, still_there


@pytest.fixture(scope="module")
def sidecar():
    with fake_sidecar() as running:
        yield running


def failure_of(sidecar, request, *, kill=None, by=signal.SIGKILL):
    """The error a request ends with, and the seconds until then; with `kill` that process is sent a signal at step 2."""
    started = time.monotonic()
    with pytest.raises((SidecarError, ValueError)) as caught:
        for event in sidecar.call(request, interrupted=never):
            if kill is not None and steps_of([event]) == [2]:
                os.kill(kill(), by)
                started = time.monotonic()
    return caught.value, time.monotonic() - started


def text(model, *, ranks):
    """A request to encode a prompt."""
    settings = ModelSettings(model=model, parallel=ParallelSettings(devices=f"cpu:{ranks}"))
    return EncodeText(job=uuid.uuid4().hex, model=settings, text="a long one")


def wait_until(condition):
    """Wait for it, a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_that_is_killed_is_named_within_five_seconds(sidecar, ranks, victim):
    run(sidecar, sample("fake?step=0.2", ranks=ranks))
    pids = rank_pids(sidecar)
    processes = [psutil.Process(pid) for pid in pids]
    request = sample("fake?step=0.2", ranks=ranks, steps=50)
    error, seconds = failure_of(sidecar, request, kill=lambda: pids[victim])
    assert seconds < 5
    assert (error.rank, error.stage, error.step) == (victim, "sampling", 2)
    assert str(error).startswith(f"rank {victim}, stage 'sampling', step 2: ") and "signal 9" in str(error)
    assert not still_there(processes, within=5)
    after = run(sidecar, sample("fake?step=0.2", ranks=ranks, steps=1))
    assert steps_of(after, "loading") and not set(rank_pids(sidecar)) & set(pids)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process cannot be stopped here")
def test_a_rank_that_hangs_is_named_when_the_others_give_up_and_all_are_replaced(monkeypatch):
    monkeypatch.setenv("FAKE_PATIENCE_SECONDS", "3")
    with fake_sidecar() as sidecar:
        run(sidecar, sample(ranks=2))
        pids = rank_pids(sidecar)
        request = sample("fake?step=0.2", ranks=2, steps=50)
        error, _ = failure_of(sidecar, request, kill=lambda: pids[1], by=signal.SIGSTOP)
        assert error.rank == 1 and "the process of this rank on cpu hangs" in str(error)
        assert steps_of(run(sidecar, sample(ranks=2))) == [1, 2, 3] and not set(rank_pids(sidecar)) & set(pids)


def test_a_rank_killed_between_jobs_is_replaced(sidecar):
    run(sidecar, sample(ranks=2))
    pids = rank_pids(sidecar)
    processes = [psutil.Process(pid) for pid in pids]
    os.kill(pids[1], signal.SIGKILL)
    assert not still_there(processes, within=30)
    wait_until(lambda: not sidecar.status().ranks)
    assert run(sidecar, sample(ranks=2)) and not set(rank_pids(sidecar)) & set(pids)


def test_a_rank_that_raises_alone_is_reported_with_its_traceback_and_all_are_replaced(sidecar):
    error, seconds = failure_of(sidecar, sample("fake?raise=1", ranks=2))
    assert seconds < 15 and error.rank == 1 and error.stage == "sampling"
    assert "RuntimeError: this rank does not like the step" in str(error)
    assert "misbehave" in error.remote_traceback
    assert steps_of(run(sidecar, sample(ranks=2))) == [1, 2, 3]


def test_memory_that_runs_out_is_marked_as_such(sidecar):
    error, _ = failure_of(sidecar, sample("fake?memory=0"))
    assert error.out_of_memory and error.rank == 0 and "80 GiB" in str(error)
    assert run(sidecar, sample())


@pytest.mark.parametrize(
    ("how", "says"), [("allocator", "tried to allocate 1.0 PiB"), ("file", "x.safetensors cannot be read")]
)
def test_host_memory_that_runs_out_on_one_rank_is_told_with_values_and_a_way_out(sidecar, how, says):
    run(sidecar, sample(ranks=2))
    before = [psutil.Process(pid) for pid in rank_pids(sidecar)]
    error, seconds = failure_of(sidecar, sample(f"fake?memory=1&how={how}", ranks=2))
    assert isinstance(error, SidecarError) and error.out_of_memory and error.rank == 1 and seconds < 15
    assert says in str(error) and "out of memory on cpu" in str(error) and "of host memory are free" in str(error)
    assert "Use a smaller picture, fewer frames, a smaller batch or offload disk (Configure Memory)" in str(error)
    assert not still_there(before, within=5)
    assert steps_of(run(sidecar, sample(ranks=2))) == [1, 2, 3]


def test_a_rank_that_ends_itself_is_reported_with_its_last_lines(sidecar):
    error, _ = failure_of(sidecar, sample("fake?exit=1", ranks=2))
    assert error.rank == 1 and "exit status 7" in str(error) and "about to end" in str(error)


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="there is no such signal here")
def test_a_rank_whose_file_is_cut_short_is_reported_with_the_name_of_the_file(sidecar, tmp_path):
    lora = tmp_path / "style.safetensors"
    lora.write_bytes(bytes(100))
    request = sample("fake?signal=1&step=0.3", ranks=2)
    loras = (LoraSettings(path=str(lora)),)
    request = request.model_copy(update={"model": request.model.model_copy(update={"loras": loras})})
    with pytest.raises(
        SidecarError, match=f"signal {signal.SIGBUS:d}, as .* a file that is in use is cut short"
    ) as caught:
        for event in sidecar.call(request, interrupted=never):
            if steps_of([event]) == [1]:
                os.truncate(lora, 40)
    assert f"{lora} has been written to (it had 100 bytes and has 40)" in str(caught.value) and caught.value.rank == 1
    assert steps_of(run(sidecar, sample(ranks=2))) == [1, 2, 3]


@pytest.mark.parametrize("model", ["fake?raise=all", "fake?file=bad"])
def test_what_all_ranks_refuse_alike_keeps_them(sidecar, model):
    run(sidecar, sample(ranks=2))
    before = rank_pids(sidecar)
    failure_of(sidecar, sample(model, ranks=2))
    assert rank_pids(sidecar) == before and run(sidecar, sample(ranks=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_read_ends_the_step_on_all_and_the_next_prompt_is_warm(sidecar, rank):
    run(sidecar, sample(ranks=2))
    before = rank_pids(sidecar)
    model = f"fake?unread={rank}"
    error, seconds = failure_of(sidecar, sample(model, ranks=2))
    assert str(error) == "the file has been changed" and seconds < 2
    after = run(sidecar, sample(model, ranks=2))
    assert rank_pids(sidecar) == before and steps_of(after) == [1, 2, 3] and not steps_of(after, "loading")


def test_a_prompt_that_the_first_rank_refuses_for_all_keeps_them(sidecar):
    run(sidecar, sample("fake?text=bad", ranks=2))
    before = rank_pids(sidecar)
    error, seconds = failure_of(sidecar, text("fake?text=bad", ranks=2))
    assert str(error) == "the prompt is too long" and seconds < 2
    assert rank_pids(sidecar) == before
    after = run(sidecar, sample("fake?text=bad", ranks=2))
    assert steps_of(after) == [1, 2, 3] and not steps_of(after, "loading")


def test_a_model_that_the_first_rank_alone_cannot_load_replaces_all(sidecar):
    run(sidecar, sample(ranks=2))
    before = rank_pids(sidecar)
    error, _ = failure_of(sidecar, text("fake?file=0", ranks=2))
    assert "is not a model" in str(error) and not set(rank_pids(sidecar)) & set(before)
    assert steps_of(run(sidecar, sample(ranks=2))) == [1, 2, 3]


def test_a_user_error_is_a_value_error_with_the_text_alone(sidecar):
    error, _ = failure_of(sidecar, sample("fake?file=bad", ranks=2))
    assert isinstance(error, ValueError) and str(error) == "fake?file=bad is not a model: choose another"


def test_ranks_that_do_not_start_are_reported_with_the_reason(monkeypatch):
    monkeypatch.setenv("FAKE_WORKER_BREAKS", "1")
    with fake_sidecar() as broken:
        error, seconds = failure_of(broken, sample(ranks=2))
        assert seconds < 30 and "did not start (exit status 3)" in str(error) and "no such library" in str(error)
        assert broken.alive


def test_a_server_that_is_killed_leaves_no_rank_and_gives_an_error_within_five_seconds():
    with fake_sidecar() as doomed:
        run(doomed, sample("fake?step=0.2", ranks=2))
        processes, server = family_of(doomed), doomed.status().pid
        error, seconds = failure_of(doomed, sample("fake?step=0.2", ranks=2, steps=50), kill=lambda: server)
        assert seconds < 5 and "killed by signal 9" in str(error)
        assert not still_there(processes, within=5) and len(processes) == 3
        assert not doomed.alive
        with pytest.raises(SidecarError, match="has ended"):
            run(doomed, sample())


def test_a_server_that_cannot_start_says_why():
    import sys

    from runtime.client import Sidecar

    program = "import sys; sys.exit('the socket is in use')"
    with pytest.raises(SidecarError, match=r"did not start[\s\S]*exit status 1[\s\S]*the socket is in use"):
        Sidecar.start(log=lambda line: None, command=[sys.executable, "-c", program])


@pytest.fixture
def stranger(sidecar):
    """A connection that says what it likes."""
    connection = Connection(sidecar._context, sidecar._process.where.endpoint)
    yield connection
    connection.close()


def answer(connection, frames, *, seconds=30.0):
    connection.send(frames)
    received = connection.receive(seconds=seconds)
    return parse(received, event_from) if received else None


def greeted(sidecar, connection):
    hello = Hello(token=sidecar._process.where.token)
    assert isinstance(answer(connection, encode(hello)[0]), Welcome)


GOOD = encode(Decode(job="bad", model=ModelSettings(model="fake"), latent=torch.zeros(4)))[0]
HEADER = msgpack.unpackb(GOOD[0])


def changed(**fields):
    return [msgpack.packb({**HEADER, **fields}), *GOOD[1:]]


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([GOOD[0]], "1 frames, 0 came"),
        ([*GOOD, b"more"], "1 frames, 2 came"),
        ([GOOD[0], b"123"], "has 3 bytes, the header says 16"),
        (changed(latent={**HEADER["latent"], "dtype": "float64"}), "not 16"),
        (changed(latent={**HEADER["latent"], "dtype": "object"}), "not one of"),
        (changed(v=99), "version 99"),
        (changed(colour="red"), "colour"),
        (changed(kind="dream"), "kind"),
    ],
)
def test_a_message_that_is_wrong_is_answered_and_the_sidecar_lives(sidecar, stranger, frames, said):
    greeted(sidecar, stranger)
    failed = answer(stranger, frames)
    assert isinstance(failed, Failed) and failed.job == "bad" and said in failed.message and not failed.user_error
    assert run(sidecar, sample())


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [os.urandom(500)], [b"", b""], [b"x" * (2 << 20)], [b"\x80"] * 80]
)
def test_bytes_that_are_nothing_are_dropped_and_the_sidecar_lives(sidecar, stranger, frames):
    greeted(sidecar, stranger)
    assert answer(stranger, frames, seconds=0.2) is None
    assert answer(stranger, encode(Status())[0]).kind == "report"


def test_a_segment_that_is_not_there_fails_the_job_alone(sidecar, stranger):
    greeted(sidecar, stranger)
    latent = {**HEADER["latent"], "frame": None, "segment": "client-none-1"}
    stranger.send([msgpack.packb({**HEADER, "latent": latent})])
    events = [None]
    while not isinstance(events[-1], Failed):
        events.append(parse(stranger.receive(seconds=30), event_from))
    assert "client-none-1" in events[-1].message and not events[-1].user_error
    assert run(sidecar, sample())


def test_who_has_not_greeted_is_refused(sidecar, stranger):
    failed = answer(stranger, GOOD)
    assert isinstance(failed, Failed) and "hello" in failed.message


@pytest.mark.parametrize("hello", [Hello(token="wrong"), Hello(), Hello(version=2)])
def test_a_wrong_token_or_version_is_refused(sidecar, stranger, hello):
    failed = answer(stranger, encode(hello)[0])
    assert isinstance(failed, Failed) and "token" in failed.message
    assert isinstance(answer(stranger, GOOD), Failed)


@pytest.mark.skipif(os.name != "posix", reason="cat")
def test_a_rank_is_told_of_by_the_device_that_the_user_chose(tmp_path):
    plan, place = Plan(1, 1, 1, 2, 1, devices=("cuda:2", "cuda:3")), {"endpoint": "", "token": "", "home": tmp_path}
    bell = SimpleNamespace(ring=lambda why: None)
    ranks = Ranks(plan, **place, pool=None, command=("cat",), bell=bell, keep=KeepSettings())
    try:
        assert [rank.settings.device for rank in ranks.all] == ["cuda:0", "cuda:1"]  # as CUDA counts what it may see
        assert [rank.report().device for rank in ranks.all] == ["cuda:2", "cuda:3"]
        job = Job(peer=b"", request=sample(), frames=[], working=ranks.all, through={0})
        assert "on cuda:3 ended" in death(job, ranks.all[1]).message
        job.failures.append(Failed(job="a", message="RuntimeError: Timed out", rank=0))
        assert "on cuda:3 hangs" in job.reason.message
    finally:
        ranks.stop()
