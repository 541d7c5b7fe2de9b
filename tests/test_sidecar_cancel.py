"""Cancel stops every rank at its next step, and nothing is loaded again."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from runtime.errors import Cancelled
from runtime.protocol import Progress
from tests.sidecars import fake_sidecar, never, rank_pids, run, sample, steps_of
from tests.timing import least

STEP_SECONDS = 0.2


@pytest.fixture(scope="module")
def sidecar():
    with fake_sidecar() as running:
        yield running


class Interrupted:
    """Says so from the moment on in which an event was seen."""

    def __init__(self):
        self.at = None

    def __call__(self):
        return self.at is not None

    def seen(self, stage, step):
        def look(event):
            if isinstance(event, Progress) and (event.stage, event.step) == (stage, step):
                self.at = self.at or time.monotonic()

        return look


def cancelled(sidecar, request, *, stage="sampling", step=2):
    """Seconds from the cancel at that step until the call ended with `Cancelled`, and the events before."""
    interrupted, events = Interrupted(), []
    look = interrupted.seen(stage, step)
    with pytest.raises(Cancelled):
        for event in sidecar.call(request, interrupted=interrupted):
            look(event)
            events.append(event)
    return time.monotonic() - interrupted.at, events


@pytest.mark.parametrize("ranks", [1, 2])
def test_cancel_takes_one_step_and_keeps_the_weights(sidecar, ranks):
    def seconds():
        taken, events = cancelled(sidecar, sample(f"fake?step={STEP_SECONDS}", ranks=ranks, steps=20))
        assert max(steps_of(events)) <= 3
        return taken

    assert least(seconds, enough=STEP_SECONDS + 0.5) < STEP_SECONDS + 0.5
    before = rank_pids(sidecar)
    after = run(sidecar, sample(f"fake?step={STEP_SECONDS}", ranks=ranks, steps=1))
    assert not steps_of(after, "loading") and rank_pids(sidecar) == before
    assert torch.isfinite(after[-1].latent).all()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process cannot be stopped here")
def test_a_rank_that_hangs_after_cancel_is_replaced(monkeypatch):
    monkeypatch.setenv("FAKE_CANCELLED_SECONDS", "1")
    with fake_sidecar() as sidecar:
        run(sidecar, sample(ranks=2))
        before = rank_pids(sidecar)
        job = sidecar.call(sample(ranks=2, steps=1000), interrupted=lambda: stopped)
        stopped = False
        for event in job:
            if getattr(event, "stage", "") == "sampling" and event.step >= 2:
                os.kill(before[1], signal.SIGSTOP)
                stopped = True
                break
        with pytest.raises(Cancelled):
            list(job)
        run(sidecar, sample(ranks=2))
        assert not set(before) & set(rank_pids(sidecar))


def test_cancel_while_loading(sidecar):
    def seconds():
        taken, events = cancelled(sidecar, sample("fake?load=0.3&again=1", ranks=2), stage="loading", step=1)
        assert not steps_of(events)
        return taken

    assert least(seconds, enough=0.3 + 0.5) < 0.3 + 0.5
    assert steps_of(run(sidecar, sample("fake?load=0.01&again=1", ranks=2))) == [1, 2, 3]


def test_cancel_while_ranks_start(sidecar):
    def seconds():
        sidecar.free()
        return cancelled(sidecar, sample(ranks=2), stage="starting ranks", step=0)[0]

    assert least(seconds, enough=0.5) < 0.5
    assert steps_of(run(sidecar, sample(ranks=2))) == [1, 2, 3]


def test_a_job_interrupted_before_it_began_does_nothing(sidecar):
    run(sidecar, sample("fake?step=0.2"))
    with pytest.raises(Cancelled):
        run(sidecar, sample("fake?step=0.2", steps=50), interrupted=lambda: True)
    assert run(sidecar, sample())


def test_a_call_that_waits_for_its_turn_can_be_cancelled(sidecar):
    first = sidecar.call(sample("fake?step=0.1", steps=1000), interrupted=never)
    next(first)
    started = time.monotonic()
    failure = []

    def second():
        try:
            run(sidecar, sample(), interrupted=lambda: time.monotonic() - started > 0.2)
        except Cancelled as error:
            failure.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(30)
    assert failure  # while the first is far from its end
    assert next(first) and first.close() is None


def test_events_that_nobody_looks_at_any_more_end_the_job(sidecar):
    events = sidecar.call(sample("fake?step=0.1", steps=1000), interrupted=never)
    while not steps_of([next(events)]):
        pass
    events.close()
    started = time.monotonic()
    assert run(sidecar, sample())
    assert time.monotonic() - started < 30  # the job would have taken 100


def test_a_sidecar_can_be_closed_in_the_middle_of_a_call_and_twice():
    with fake_sidecar() as running:
        events = running.call(sample("fake?step=0.1", steps=100), interrupted=never)
        next(events)
        running.close()
        assert not running.alive
        events.close()


def test_the_second_client_of_a_server_waits_its_turn_and_can_cancel_it(sidecar):
    """Two connections, as of two programs, to the same server."""
    from runtime.channel import Connection, encode, parse
    from runtime.protocol import Cancel, Hello, Report, Status, Stopped, Welcome, event_from

    address = sidecar._process.where
    other = Connection(sidecar._context, address.endpoint)

    def ask(message):
        other.send(encode(message)[0])
        return parse(other.receive(seconds=30), event_from)

    assert isinstance(ask(Hello(token=address.token)), Welcome)
    first = sidecar.call(sample("fake?step=0.1", steps=50), interrupted=never)
    while not steps_of([next(first)]):
        pass
    waiting = sample()
    other.send(encode(waiting)[0])
    report = ask(Status())
    assert isinstance(report, Report) and report.busy and report.busy != waiting.job
    assert ask(Cancel(job=waiting.job)) == Stopped(job=waiting.job)
    after = sample(shape=(5,))
    other.send(encode(after)[0])
    assert len(steps_of(list(first))) > 5
    kinds = []
    while not kinds or kinds[-1] != "sampled":
        kinds.append(parse(other.receive(seconds=60), event_from).kind)
    other.close()
