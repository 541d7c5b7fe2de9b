"""The sidecar's server: between the clients and the ranks, in one loop. It looks at no tensor and imports no torch."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import zmq

from .channel import Bell, Frames, Listener, encode, parse
from .errors import ProtocolError, Refused
from .executor import Executor, Job
from .folders import SHARED_MEMORY, PrivateFolder, temporary_base
from .host_memory import UNKNOWN, HostMemory
from .machine import Machine
from .out_of_memory import is_out_of_memory
from .plan import Plan, plan_work
from .pool import pool_limit
from .protocol import (
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    Address,
    Cancel,
    Event,
    Failed,
    Free,
    Hello,
    Shutdown,
    Status,
    Stopped,
    Welcome,
    Work,
    request_from,
)
from .rank_settings import KeepSettings
from .ranks import ENDED, WORKER

END = "end"
STUCK_SECONDS = 3.0
"""How long the loop may take to notice that its host is gone."""

log = logging.getLogger("outrigger")


class Server:
    """Takes requests in order, one job at a time; answers `Status` and `Cancel` at once."""

    def __init__(
        self,
        endpoint: str = "",
        *,
        plan_for: Callable[[Work, int | None], Plan] | None = None,
        command: Sequence[str] = WORKER,
        keep: KeepSettings = KeepSettings(),
    ) -> None:
        self.token = secrets.token_hex(16)
        self._context: zmq.Context[Any] = zmq.Context()
        self.bell = Bell(self._context)
        self._home, self._pool = PrivateFolder(temporary_base()), _pool_folder()
        try:
            self._clients = Listener(self._context, endpoint or _default_endpoint(self._home.path, "client"))
            self._workers = Listener(self._context, _default_endpoint(self._home.path, "ranks"))
        except Refused:
            self._remove_folders()
            raise
        self._known: set[bytes] = set()
        self._queue: deque[Job] = deque()
        self._executor = Executor(
            listener=self._workers,
            bell=self.bell,
            token=self.token,
            home=self._home.path,
            pool=self._pool.path if self._pool else None,
            answer=self._clients.send,
            plan_for=plan_for or _plan_for,
            command=command,
            keep=keep,
        )

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._clients.endpoint

    def run(self) -> None:
        """Receive, act, reply, until told to end."""
        poller = zmq.Poller()
        for end in (self.bell, self._workers, self._clients):
            poller.register(end.socket, zmq.POLLIN)
        going = True
        while going:
            ready = dict(poller.poll(self._executor.patience()))
            if self.bell.socket in ready:
                going = self._woken(self.bell.answer())
            if self._workers.socket in ready:
                self._executor.hear(*self._workers.receive())
            if self._clients.socket in ready and going:
                going = self._act(*self._clients.receive())
            self._executor.tick()
            self._begin_next()

    def close(self) -> None:
        """End the ranks and remove what is ours on this machine."""
        self._executor.stop()
        for end in (self.bell, self._workers, self._clients):
            end.close()
        self._context.term()
        self._remove_folders()

    def _act(self, peer: bytes, frames: Frames) -> bool:
        """Whether to go on after this message of a client."""
        try:
            request = parse(frames, request_from)
        except ProtocolError as error:
            self._refuse(peer, error)
            return True
        if not isinstance(request, Hello) and peer not in self._known:
            self._refuse(peer, ProtocolError("say hello first", job=getattr(request, "job", "")))
            return True
        match request:
            case Hello():
                self._welcome(peer, request)
            case Work():
                self._queue.append(Job(peer=peer, request=request, frames=frames))
            case Cancel(job=name):
                self._cancel(name)
            case Status(model=model, part=part):
                self._answer(peer, self._executor.report(model, part))
            case Free():
                self._executor.free()
                self._answer(peer, self._executor.report())
            case Shutdown():
                return False
        return True

    def _woken(self, why: str) -> bool:
        if why.startswith(ENDED):
            self._executor.ended(why.removeprefix(ENDED).encode())
        return why != END

    def _begin_next(self) -> None:
        while self._queue and self._executor.job is None:
            job = self._queue.popleft()
            try:
                self._executor.begin(job)
            except Exception as error:  # this process's one handler: the job fails, the sidecar lives
                log.exception("could not start a job")
                self._executor.job = None
                message, short = f"{type(error).__name__}: {error}"[:MAX_MESSAGE], is_out_of_memory(error)
                self._answer(job.peer, Failed(job=job.name, message=message, out_of_memory=short))

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            reason = f"protocol version {hello.version}, not {PROTOCOL_VERSION}, or a wrong token"
            return self._answer(peer, Failed(job="hello", message=reason))
        self._known.add(peer)
        pool = self._pool.path.name if self._pool else ""
        self._answer(peer, Welcome(pid=os.getpid(), pool=pool))

    def _cancel(self, name: str) -> None:
        for job in [job for job in self._queue if job.name == name]:
            self._queue.remove(job)
            self._answer(job.peer, Stopped(job=name))
        self._executor.cancel(name)

    def _refuse(self, peer: bytes, error: ProtocolError) -> None:
        log.warning("refused a message: %s", error)
        if error.job:
            self._answer(peer, Failed(job=error.job, message=f"the sidecar refused the message: {error}"[:MAX_MESSAGE]))

    def _answer(self, peer: bytes, event: Event) -> None:
        self._clients.send(peer, encode(event)[0])

    def _remove_folders(self) -> None:
        for folder in (self._home, self._pool):
            if folder:
                folder.remove()


def run_server(server: Server, *, stdin_guard: bool = False) -> int:
    """Announce the address as a line of JSON on standard output, and serve until told to end."""
    end_with_signals(server.bell)
    if stdin_guard:
        end_with_stdin(server.bell)
    sys.stdout.write(Address(endpoint=server.endpoint, token=server.token, pid=os.getpid()).model_dump_json() + "\n")
    sys.stdout.flush()
    try:
        server.run()
    finally:
        server.close()
    return 0


def end_with_stdin(bell: Bell) -> None:
    """End the sidecar when its standard input does: that is seen in every way in which the host can end."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        bell.ring(END)
        time.sleep(STUCK_SECONDS)
        os._exit(1)  # the loop is stuck; the ranks' own lifelines end with this process

    threading.Thread(target=watch, daemon=True).start()


def end_with_signals(bell: Bell) -> None:
    """End the sidecar in good order on Ctrl-C and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: bell.ring(END))


@cache
def _machine() -> Machine:
    return Machine.here()


def _plan_for(work: Work, held: int | None) -> Plan:
    """The plan of a request, with the host memory that is free now beside what is `held`; None: however much there is."""
    host = UNKNOWN if held is None else HostMemory.here(freed=held)
    return plan_work(work, replace(_machine(), host=host))


def _default_endpoint(home: Path, name: str) -> str:
    return f"ipc://{home / name}" if os.name == "posix" else "tcp://127.0.0.1:*"


def _pool_folder() -> PrivateFolder | None:
    if not pool_limit():
        return None
    try:
        return PrivateFolder(SHARED_MEMORY)
    except Refused as error:
        log.warning("no shared memory (%s): tensors travel in frames, which is slower", error)
        return None
