"""The sidecar as the nodes see it: start the process; a call gives its events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import zmq

from .channel import Connection, decode, encode, parse
from .chosen_part import PartKind
from .comparison import Comparison as Comparison  # for the nodes, which take it from here
from .environment import check_environment
from .errors import Cancelled, ProtocolError, SidecarError
from .folders import shared_folder, sweep_all
from .launch import CLOSE_SECONDS, SERVER, START_SECONDS, Process
from .pool import SMALLEST_BYTES, Mappings, Pool
from .protocol import (
    Address,
    Cancel,
    Event,
    Failed,
    Free,
    Hello,
    Notice,
    Progress,
    Report,
    Result,
    Status,
    Stopped,
    Welcome,
    Work,
    event_from,
)
from .settings import ModelSettings

POLL_SECONDS = 0.05
CANCEL_SECONDS = 10.0
"""How long a cancelled call waits for the ranks to stop; they do so at their next step in any case."""


class Sidecar:
    """A running sidecar. One call at a time; calls may come from different threads."""

    def __init__(self, process: Process, context: zmq.Context[Any], connection: Connection, welcome: Welcome) -> None:
        self._process, self._context, self._connection = process, context, connection
        folder = shared_folder(welcome.pool)
        self._pool, self._mappings = Pool(folder, owner="client"), Mappings(folder)
        self._lent: dict[str, list[str]] = {}
        self._turn = threading.Lock()
        self._caller: int | None = None
        """The thread whose call is under way."""
        self._early: deque[Event] = deque()
        """Events of that call which came while the thread asked for a report."""
        self._said_slow = False

    @classmethod
    def start(cls, *, log: Callable[[str], None] | None = None, command: Sequence[str] = SERVER) -> Sidecar:
        """Start the process and greet it; its lines go to `log`. Raises `SidecarError` with the reason, and `ValueError` for
        an environment variable of ours that has an odd value.
        """
        check_environment()
        sweep_all()
        with ExitStack() as undo:
            context: zmq.Context[Any] = zmq.Context()
            undo.callback(context.destroy, linger=0)
            process = Process(command, log=log or logging.getLogger("outrigger").info)
            undo.callback(process.end)
            address = process.address()
            connection = Connection(context, address.endpoint)
            sidecar = cls(process, context, connection, _greet(connection, address, process))
            undo.pop_all()
            return sidecar

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive

    def call(self, request: Work, *, interrupted: Callable[[], bool]) -> Iterator[Event]:
        """Run a request: yields `Progress` and `Notice` as they come, and the result last.

        `interrupted` is asked at least every 100 ms; when it says so the job is cancelled and `Cancelled` raised. Raises
        `ValueError` for what the user can put right, `SidecarError` for everything else, and so for a call in the midst of
        another one of the same thread.
        """
        with self._my_turn(interrupted):
            yield from self._send(request)
            ended = False
            try:
                for event in self._events(request.job, interrupted):
                    ended = not isinstance(event, (Progress, Notice))
                    yield event
            finally:
                if not ended and self.alive:  # an error, a cancel, or nobody looks at the events any more
                    self._connection.send(encode(Cancel(job=request.job))[0])

    def status(self, model: ModelSettings | None = None, part: PartKind | None = None) -> Report:
        """How the sidecar is, and what a job with this model, and this part of it, would still take; also in the midst of a
        call of this thread. Raises `SidecarError` when it is gone.
        """
        question = Status(model=model, part=part)
        if self._is_mine:
            return self._report(question)
        with self._turn:
            return self._report(question)

    def free(self) -> Report | None:
        """Have everything that is loaded let go of; None where a call is under way, which needs it. Raises as `status`."""
        if self._is_mine or not self._turn.acquire(timeout=POLL_SECONDS):
            return None
        try:
            return self._report(Free())
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process, its ranks with it, and remove what it leaves."""
        self._process.end()
        self._pool.close()
        # a call in another thread sees that the process has ended
        held = not self._is_mine and self._turn.acquire(timeout=CLOSE_SECONDS)
        self._context.destroy(linger=0)
        if held:
            self._turn.release()
        sweep_all()

    @property
    def _is_mine(self) -> bool:
        """Whether a call of this very thread is under way: it would wait for itself."""
        return self._caller == threading.get_ident()

    @contextmanager
    def _my_turn(self, interrupted: Callable[[], bool]) -> Iterator[None]:
        if self._is_mine:
            raise SidecarError(
                "a call of this thread is under way: take its events to the end, or close it, before the next"
            )
        while not self._turn.acquire(timeout=POLL_SECONDS):
            if interrupted():
                raise Cancelled
        self._caller = threading.get_ident()
        try:
            yield
        finally:
            self._caller = None
            self._early.clear()
            self._turn.release()

    def _report(self, question: Status | Free) -> Report:
        self._connection.send(encode(question)[0])
        while True:
            event = self._receive()
            if isinstance(event, Report):
                return event
            if event is not None and self._is_mine:
                self._early.append(event)

    def _send(self, request: Work) -> Iterator[Notice]:
        frames, refs = encode(request, pool=self._pool)
        self._lent[request.job] = [ref.segment for ref in refs if ref.segment]
        self._connection.send(frames)
        if not self._said_slow and any(ref.frame and ref.nbytes >= SMALLEST_BYTES for ref in refs):
            self._said_slow = True
            text = "shared memory has no room (a small /dev/shm): inputs travel through a socket, which is slower"
            self._process.log(text)
            yield Notice(job=request.job, text=text)

    def _events(self, job: str, interrupted: Callable[[], bool]) -> Iterator[Event]:
        give_up = None
        while True:
            if give_up is None and interrupted():
                self._connection.send(encode(Cancel(job=job))[0])
                give_up = time.monotonic() + CANCEL_SECONDS
            if give_up is not None and time.monotonic() > give_up:
                raise Cancelled
            event = self._early.popleft() if self._early else self._receive()
            if getattr(event, "job", None) != job:
                continue  # of a job that was given up
            match event:
                case Progress() | Notice():
                    yield event
                case Failed() if give_up is None:
                    raise _error_of(event)
                case Result() if give_up is None:
                    yield event
                    return
                case _:
                    raise Cancelled

    def _receive(self) -> Event | None:
        """The next event, with its tensors; None when there is none for a moment."""
        if self._context.closed:
            self._process.check()
        frames = self._connection.receive(seconds=POLL_SECONDS)
        if frames is None:
            self._process.check()
            return None
        try:
            event = decode(parse(frames, event_from), frames, mappings=self._mappings, give_back=True)
        except ProtocolError as error:
            raise SidecarError(f"the sidecar sent what is not a message: {error}") from error
        if isinstance(event, (Result, Stopped, Failed)):
            for name in self._lent.pop(event.job, ()):
                self._pool.give_back(name)  # every rank is through with the request
        return event


def _greet(connection: Connection, address: Address, process: Process) -> Welcome:
    connection.send(encode(Hello(token=address.token))[0])
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        frames = connection.receive(seconds=POLL_SECONDS)
        if frames is None:
            process.check()
            continue
        answer = parse(frames, event_from)
        if isinstance(answer, Welcome):
            return answer
        raise SidecarError(f"the sidecar did not welcome us: {getattr(answer, 'message', answer.kind)}")
    raise SidecarError(f"the sidecar did not answer within {START_SECONDS:.0f} s")


def _error_of(failed: Failed) -> Exception:
    if failed.user_error:
        return ValueError(failed.message)
    places = (
        f"rank {failed.rank}" if failed.rank is not None else "",
        f"stage {failed.stage!r}" if failed.stage else "",
        f"step {failed.step}" if failed.step is not None else "",
    )
    where = ", ".join(place for place in places if place)
    message = f"{where}: {failed.message}" if where else failed.message
    return SidecarError(
        message,
        rank=failed.rank,
        stage=failed.stage,
        step=failed.step,
        out_of_memory=failed.out_of_memory,
        remote_traceback=failed.traceback,
    )
