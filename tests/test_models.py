"""Several models in one sidecar: what stays loaded, when it is let go of, and what a fault in between leaves."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest
import torch

from runtime.client import Sidecar
from runtime.errors import SidecarError
from runtime.protocol import Sample
from runtime.settings import ModelSettings, ParallelSettings
from tests.ranks import Case, sample_request
from tests.sidecars import fake_sidecar, family_of, never, rank_pids, run, sample, steps_of, still_there

A, B, C = (f"fake?name={name}&bytes={30 << 20}" for name in "abc")


@contextmanager
def keeping(**variables: str) -> Iterator[Sidecar]:
    """A sidecar that keeps so much."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(f"OUTRIGGER_{name}", value)
            running = stack.enter_context(fake_sidecar())
        yield running


@pytest.fixture(scope="module")
def roomy() -> Iterator[Sidecar]:
    """One that keeps three of the models on two ranks, for ever."""
    with keeping(KEEP_HOST="200MB", IDLE_MINUTES="0") as running:
        yield running


@pytest.fixture(scope="module")
def narrow() -> Iterator[Sidecar]:
    """One that keeps the model in use alone."""
    with keeping(KEEP_HOST="0") as running:
        yield running


def loaded(sidecar, model, **settings) -> bool:
    """Whether a prompt with this model loads it."""
    return bool(steps_of(run(sidecar, sample(model, **settings)), "loading"))


def models_of(sidecar) -> list[list[str]]:
    """The models of each rank, the one used last at the end."""
    return [[held.model.model for held in rank.memory.models] for rank in sidecar.status().ranks]


def wait_until_free(sidecar, seconds: float) -> None:
    """Wait until the sidecar has no ranks any more."""
    end = time.monotonic() + seconds
    while sidecar.status().ranks:
        assert time.monotonic() < end, "the ranks are there still"
        time.sleep(0.05)


def test_models_that_fit_take_turns_without_a_load_and_each_rank_says_what_it_has(roomy):
    running = roomy
    assert [loaded(running, model, ranks=2) for model in (A, B, A, B, A)] == [True, True, False, False, False]
    report = running.status()
    assert models_of(running) == [[B, A]] * 2
    assert [held.host_bytes for rank in report.ranks for held in rank.memory.models] == [30 << 20] * 4
    assert all(rank.resident_bytes > 50 << 20 for rank in report.ranks) and report.bytes_on("cpu") == 120 << 20
    assert report.memory.startswith("each of 2 ranks: fake?name=b&bytes=31457280 30.0 MiB of host memory, fake?name=a")


def test_the_model_used_longest_ago_makes_room_on_every_rank():
    with keeping(KEEP_HOST="70MB") as running:  # two of the models, which both ranks share
        order = [loaded(running, model, ranks=2) for model in (A, B, A, C, A, B)]
        assert order == [True, True, False, True, False, True] and models_of(running) == [[A, B]] * 2


def test_what_the_first_rank_lets_go_of_while_it_runs_alone_is_gone_on_every_rank(narrow):
    run(narrow, sample(A, ranks=2))
    run(narrow, sample(B, ranks=1))
    end = time.monotonic() + 20
    while models_of(narrow) != [[B], []]:  # the others are told while the job runs, and answer when they like
        assert time.monotonic() < end, models_of(narrow)
        time.sleep(0.02)
    assert loaded(narrow, A, ranks=2) and models_of(narrow) == [[A]] * 2


def test_status_says_what_a_model_would_still_take(roomy):
    run(roomy, sample(A, ranks=2))
    rooms = [roomy.status(ModelSettings(model=model)).room for model in (A, "fake?name=other")]
    assert rooms == [{}, {"cpu": 5 << 20}]  # what the plan of the pretending server says


def test_status_says_what_the_part_that_a_job_needs_would_take_beside_the_transformer(roomy):
    model = ModelSettings(model="tiny-shapes", parallel=ParallelSettings(devices="cuda:0,1"))
    alone, with_vae = (roomy.status(model, part).room for part in (None, "vae"))
    more = {device: with_vae[device] - size for device, size in alone.items()}
    assert alone == dict.fromkeys(("cuda:0", "cuda:1"), 5 << 20) and min(more.values()) > 1 << 20


def test_free_ends_the_ranks_and_the_next_prompt_works(roomy):
    running = roomy
    run(running, sample(A, ranks=2))
    processes = [psutil.Process(pid) for pid in rank_pids(running)]
    report = running.free()
    assert report.ranks == () and not still_there(processes, within=5)
    assert loaded(running, A, ranks=2) and not loaded(running, A, ranks=2)


def test_free_while_a_job_runs_leaves_it_alone(roomy):
    running, slow = roomy, {"model": "fake?step=0.1", "ranks": 2}
    run(running, sample(**slow))
    before = rank_pids(running)
    events = running.call(sample(**slow, steps=4), interrupted=never)
    seen = [next(events)]
    assert running.free() is None
    seen += list(events)
    assert steps_of(seen) == [1, 2, 3, 4] and rank_pids(running) == before


def test_after_the_idle_time_everything_is_gone_and_the_next_prompt_works():
    with keeping(IDLE_MINUTES="0.02") as running:
        run(running, sample("fake?step=0.5", ranks=2, steps=4))  # which takes longer than the idle time
        server, *ranks = family_of(running)
        assert len(ranks) == 2
        wait_until_free(running, 20)
        assert not still_there(ranks, within=5) and server.is_running()
        assert loaded(running, A)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_a_model_is_loaded_in_the_place_of_another_is_one_error(narrow, victim):
    running = narrow
    run(running, sample(A, ranks=2))
    pids = rank_pids(running)
    with pytest.raises(SidecarError, match=f"rank {victim}, stage 'loading'.*signal 9"):
        for event in running.call(sample(f"{B}&load=0.3", ranks=2), interrupted=never):
            if steps_of([event], "loading") == [1]:
                os.kill(pids[victim], signal.SIGKILL)
    assert loaded(running, A, ranks=2) and models_of(running) == [[A]] * 2


def test_a_model_that_is_refused_leaves_those_that_are_loaded(roomy):
    running = roomy
    run(running, sample(A, ranks=2))
    with pytest.raises(ValueError, match="is not a model"):
        run(running, sample("fake?file=bad", ranks=2))
    assert not loaded(running, A, ranks=2)


def test_other_degrees_on_the_same_devices_keep_the_ranks_and_what_each_mesh_has_loaded():
    """With a real model: two ranks that split the tokens, and the layers, and the tokens again."""
    latents, loads, ranks = [], [], []
    running = Sidecar.start(log=lambda line: None)
    try:
        for degrees in ({"ulysses": 2}, {"tensor": 2}, {"ulysses": 2}, {"tensor": 2}):
            parallel = ParallelSettings(devices="cpu:2", **degrees)
            model = ModelSettings(model="random:wan", parallel=parallel)
            *events, last = run(running, sampled(model))
            latents.append(last.latent)
            loads.append(bool(steps_of(events, "loading")))
            ranks.append(rank_pids(running))
    finally:
        running.close()
    assert loads == [True, True, False, False] and all(pids == ranks[0] for pids in ranks)
    assert torch.equal(latents[0], latents[2]) and torch.equal(latents[1], latents[3])
    assert float((latents[1] - latents[0]).norm() / latents[0].norm()) < 2e-6


def sampled(model: ModelSettings) -> Sample:
    """A short run of a tiny model."""
    request = sample_request(Case())
    return request.model_copy(update={"model": model, "job": uuid.uuid4().hex})
