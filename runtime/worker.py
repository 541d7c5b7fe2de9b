"""One rank: its mesh, its pipeline and its loop of requests."""

from __future__ import annotations

import logging
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zmq
from pydantic import ValidationError

from .channel import Connection, Frames, decode, encode, parse, problems_of
from .encoders.remembered import RememberedPrompts
from .errors import Cancelled
from .folders import shared_folder
from .mesh import Mesh
from .out_of_memory import in_words, is_out_of_memory
from .pool import SMALLEST_BYTES, Mappings, Pool
from .protocol import (
    MAX_MESSAGE,
    MAX_NOTICE,
    Cancel,
    Decode,
    Decoded,
    Encoded,
    EncodedPixels,
    EncodePixels,
    EncodeText,
    Event,
    Failed,
    Finished,
    HeldModel,
    Keep,
    Memory,
    Notice,
    Ready,
    Sample,
    Sampled,
    Shutdown,
    Spread,
    Stopped,
    Work,
    request_from,
)
from .rank_settings import RankSettings
from .release import release_memory
from .reporter import Reporter
from .settings import ModelSettings, ParallelSettings
from .shelf import Shelf
from .weighing import Bytes

PATIENCE_SECONDS = 1800.0
"""How long a rank waits for another within a job."""

log = logging.getLogger("outrigger")


class Worker:
    """Runs requests in the order they come, with the pipelines that the shelf holds."""

    def __init__(self, settings: RankSettings, *, load: Callable[..., Any]) -> None:
        self.settings, self._load = settings, load
        self.mesh = _mesh(settings)
        folder = shared_folder(settings.pool)
        self._pool, self._mappings = Pool(folder, owner=settings.identity), Mappings(folder)
        self._connection = Connection(zmq.Context.instance(), settings.endpoint, identity=settings.identity)
        self._parallel = settings.parallel
        self._meshes = {self._parallel: self.mesh}
        self._shelf = Shelf(settings.keep, world=settings.world, device=self.mesh.device)
        self._threads = torch.get_num_threads() * settings.world
        self._prompts = RememberedPrompts(0 if settings.rank else settings.keep.prompt_bytes)
        self._told = Memory()
        self._said_slow = False
        self.send(Ready(pid=os.getpid(), token=settings.token))

    def run(self) -> None:
        """Receive, act, reply, until told to end."""
        while True:
            frames = self._connection.receive()
            request = parse(frames, request_from)
            match request:
                case Work():
                    self._do(request, frames)
                case Spread():
                    self._stand_in(request.parallel)
                case Keep(models=models):
                    self._shelf.keep(models)
                    self._tell_memory()
                case Shutdown():
                    return
                case _:
                    pass  # a Cancel that came after its job's end

    def send(self, event: Event) -> None:
        """Send an event up, large tensors through shared memory."""
        frames, refs = encode(event, pool=self._pool)
        if any(ref.frame and ref.nbytes >= SMALLEST_BYTES for ref in refs):
            self._say_slow(event)
        self._connection.send(frames)

    def _stand_in(self, parallel: ParallelSettings) -> None:
        """Stand in a mesh of these degrees, which is that of all ranks or of this one alone. What is loaded stays in its own,
        for when that is asked for again.
        """
        if parallel not in self._meshes:
            alone = parallel.product == 1
            self._meshes[parallel] = (Mesh.alone if alone else Mesh.of_world)(
                parallel.degrees, device=self.settings.device
            )
        self.mesh, self._parallel = self._meshes[parallel], parallel
        torch.set_num_threads(max(1, self._threads // self.mesh.world))

    def cancel_came(self, job: str) -> bool:
        """Whether the client has asked to stop this job. Does not wait."""
        frames = self._connection.receive(seconds=0)
        return frames is not None and parse(frames, request_from) == Cancel(job=job)

    def _do(self, request: Work, frames: Frames) -> None:
        """Run one request; whatever goes wrong becomes the event that ends it."""
        report = Reporter(request.job, mesh=self.mesh, send=self.send, cancel_came=self.cancel_came)
        try:
            with torch.inference_mode():
                event = self._result(decode(request, frames, mappings=self._mappings, give_back=False), report)
            self._tell_memory()
            return self.send(event)
        except Cancelled:
            event = Stopped(job=request.job)
        except Exception as error:  # this process's one handler: the job fails, the rank lives
            event = self._failure(request, report, error)
        self._tell_memory()
        self.send(event)
        if isinstance(event, Failed):
            release_memory()  # only here have the tensors that the error held on to gone

    def _result(self, request: Work, report: Reporter) -> Event:
        """The event that ends the request: rank 0's with the result, the others' without."""
        pipeline = self._pipeline_for(request.model, report)
        started = time.perf_counter()
        match request:
            case EncodeText():
                chosen = {"loras": request.model.loras, "progress": report}
                result = partial(Encoded, conditioning=pipeline.encode_text(request.text, **chosen))
            case Sample():
                self._use_loras(pipeline, request)
                result = partial(Sampled, latent=pipeline.sample(request, progress=report))
            case Decode():
                result = partial(Decoded, images=pipeline.decode(request.latent, progress=report))
            case EncodePixels():
                result = partial(EncodedPixels, latent=pipeline.encode(request.pixels, progress=report))
        if self.settings.rank != 0:
            return Finished(job=request.job)
        return result(job=request.job, seconds=time.perf_counter() - started)

    def _pipeline_for(self, model: ModelSettings, report: Reporter) -> Any:
        """The pipeline of these settings in this mesh, loaded where it is not. LoRAs come on later, so that one that is
        refused leaves the model loaded.
        """
        key, chosen = self._key(model), model.model_copy(update={"loras": (), "parallel": self._parallel})
        pipeline = self._shelf.take(key, mesh=self.mesh)
        if pipeline is not None:
            pipeline.use_parts(chosen)
            return pipeline
        place = {"mesh": self.mesh, "prompts": self._prompts, "make_room": self._make_room}
        pipeline = self._load(chosen, progress=report, **place)
        self._shelf.put(key, pipeline)
        self._make_room(Bytes())  # blocks that were left to the free memory may take more than was asked for
        return pipeline

    def _make_room(self, needed: Bytes) -> None:
        """Let go of what has to, here and, as the server then tells them, on ranks that have no part in the job."""
        self._shelf.make_room(needed, mesh=self.mesh)
        self._tell_memory()

    def _key(self, model: ModelSettings) -> ModelSettings:
        """What is loaded for these settings, and how it is spread: by this process's plan."""
        return model.weights.model_copy(update={"parallel": self._parallel})

    def _tell_memory(self) -> None:
        """Tell the server what is loaded, when that has changed."""
        parts = self._shelf.parts_of
        models = tuple(
            HeldModel(model=weights, device_bytes=held.device, host_bytes=held.host, parts=parts(weights))
            for weights, held in self._shelf.held().items()
        )
        memory = Memory(models=models, prompt_bytes=self._prompts.nbytes)
        if memory != self._told:
            self._told = memory
            self.send(memory)

    def _use_loras(self, pipeline: Any, request: Sample) -> None:
        """Sample with the LoRAs of the request alone, and tell what each of them does."""
        for text in pipeline.use_loras(request.model.loras):
            if self.settings.rank == 0:
                self.send(Notice(job=request.job, text=textwrap.shorten(text, MAX_NOTICE, placeholder=" ...")))

    def _failure(self, request: Work, report: Reporter, error: Exception) -> Failed:
        out_of_memory = is_out_of_memory(error)
        user_error = isinstance(error, ValueError) and not out_of_memory
        text = problems_of(error) if isinstance(error, ValidationError) else str(error)
        if out_of_memory:
            text = in_words(error, device=self.settings.device_name, offload=request.model.memory.offload)
        elif not user_error:
            text = f"{type(error).__name__}: {text}"
        return Failed(
            job=request.job,
            message=text[:MAX_MESSAGE],
            user_error=user_error,
            out_of_memory=out_of_memory,
            loaded=self._key(request.model) in self._shelf,
            rank=self.settings.rank,
            stage=report.stage[:64],
            step=report.step,
            traceback="".join(traceback.format_exception(error))[-(1 << 16) :],
        )

    def _say_slow(self, event: Event) -> None:
        if self._said_slow:
            return
        self._said_slow = True
        text = (
            "shared memory has no room (a small /dev/shm, as in Docker without --shm-size): results travel through "
            "a socket, which is slower"
        )
        log.warning(text)
        self.send(Notice(job=getattr(event, "job", ""), text=text))


def run(*, load: Callable[..., Any]) -> None:
    """Be the rank that the line on standard input describes, until standard input ends. `load` gives a model's pipeline."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    settings = RankSettings.model_validate_json(sys.stdin.readline())
    _end_with_stdin()
    Worker(settings, load=load).run()


def _end_with_stdin() -> None:
    """End with the server, also when this rank waits for another in a collective."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with the compilers that this rank may have started
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _mesh(settings: RankSettings) -> Mesh:
    place = {"rank": settings.rank, "device": settings.device}
    store = f"file://{settings.store}"
    return Mesh.join(settings.parallel.degrees, **place, init_method=store, timeout=PATIENCE_SECONDS)


def main() -> None:
    """Be a rank with the engine."""
    from .loading import load_pipeline

    run(load=load_pipeline)


if __name__ == "__main__":
    main()
