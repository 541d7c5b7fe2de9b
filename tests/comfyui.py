"""A real ComfyUI server in a process of its own, and a client of its queue and websocket.

Used by the tests and by `demo.py`. Nothing of ComfyUI is imported here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import websocket

ROOT = Path(__file__).resolve().parents[1]
PACK = "outrigger"
PREVIEW, TEXT, PREVIEW_WITH_METADATA = 1, 3, 4
ENDS = ("execution_success", "execution_error", "execution_interrupted")
NOT_PART_OF_THE_PACK = (".git", ".nox", "build", "output", "tests", "__pycache__", ".pytest_cache", ".ruff_cache")


class Refused(Exception):
    """ComfyUI did not take a prompt; `node_errors` says why, by node."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(json.dumps(answer))
        self.node_errors: dict[str, Any] = answer.get("node_errors") or {}

    def details(self, node: str) -> str:
        """The reasons given for one node, as one text."""
        return "\n".join(f"{error['message']}: {error['details']}" for error in self.node_errors[node]["errors"])


@dataclass(frozen=True)
class Event:
    """One message of the websocket: `at` is `time.monotonic()` of its arrival."""

    kind: str
    data: dict[str, Any]
    at: float


@dataclass
class Run:
    """A prompt that was queued, and what came of it."""

    server: ComfyUI
    prompt_id: str
    queued_at: float
    events: list[Event] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float = 120.0) -> Run:
        """Wait for the end, however it ends."""
        if not self.done.wait(seconds):
            raise TimeoutError(f"no end after {seconds} s; ComfyUI's log ends:\n{self.server.log_tail()}")
        return self

    def of(self, kind: str, node: str | None = None) -> list[Event]:
        """Events of one kind, of one node."""
        return [e for e in list(self.events) if e.kind == kind and (node is None or str(e.data.get("node")) == node)]

    def wait_for(self, kind: str, *, node: str | None = None, count: int = 1, seconds: float = 120.0) -> Event:
        """Wait until that many events of a kind have come; the last of them."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.of(kind, node)
            if len(found) >= count:
                return found[count - 1]
            if self.done.is_set():
                raise AssertionError(f"the prompt ended with {self.end.kind} {self.end.data} before {count} x {kind}")
            time.sleep(0.005)
        raise TimeoutError(f"not {count} x {kind} after {seconds} s")

    @property
    def end(self) -> Event:
        """The event that ended the prompt."""
        return next(event for event in self.events if event.kind in ENDS)

    @property
    def error(self) -> dict[str, Any]:
        """What an `execution_error` says."""
        assert self.end.kind == "execution_error", f"ended with {self.end.kind}: {self.end.data}"
        return self.end.data

    def texts(self, node: str | None = None) -> list[str]:
        """Lines of text shown on a node."""
        return [event.data["text"] for event in self.of("text", node)]

    def outputs(self, seconds: float = 10.0) -> dict[str, Any]:
        """What the output nodes gave, by node; the history has it a moment after the end."""
        end = time.monotonic() + seconds
        while not (history := self.server.get(f"/history/{self.prompt_id}")) and time.monotonic() < end:
            time.sleep(0.02)
        return history[self.prompt_id]["outputs"]

    def files(self, kind: str) -> dict[str, list[Path]]:
        """Files of a kind ("images", "latents") that the prompt's output nodes wrote, by node."""
        place = self.server.output
        return {
            node: [place / each["subfolder"] / each["filename"] for each in output.get(kind, ())]
            for node, output in self.outputs().items()
        }

    def images(self) -> list[Path]:
        """Pictures that the prompt's output nodes wrote."""
        return [path for paths in self.files("images").values() for path in paths]

    def seconds(self) -> dict[str, float]:
        """How long each node ran, by node id, in order."""
        marks = [(str(e.data["node"]), e.at) for e in self.of("executing") if e.data["node"] is not None]
        ends = [at for _, at in marks[1:]] + [self.end.at]
        return {node: end - start for (node, start), end in zip(marks, ends, strict=True)}


class ComfyUI:
    """A ComfyUI server with this pack, in a folder of its own.

    `tree` is ComfyUI's folder, `base` where models, outputs and custom nodes are kept.
    """

    def __init__(
        self,
        tree: Path,
        base: Path,
        *,
        arguments: tuple[str, ...] = ("--cpu",),
        environment: dict[str, str] | None = None,
        output: Path | None = None,
        pack: Path = ROOT,
        port: int = 0,
    ) -> None:
        self.tree, self.base, self.output = tree, base, output or base / "output"
        self.port = port or _free_port()
        self.log = base / "comfyui.log"
        self._arguments, self._environment, self._pack = arguments, environment or {}, pack
        self._runs: dict[str, Run] = {}
        self.client_id = uuid.uuid4().hex

    def start(self, seconds: float = 120.0) -> ComfyUI:
        """Start the process and wait until it answers."""
        install_pack(self.base, self._pack)
        self.process = subprocess.Popen(
            [*self._command(), *self._arguments],
            cwd=self.tree,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_default_interrupt if os.name == "posix" else None,
        )
        try:
            self._wait_until_ready(seconds)
            self._listen()
        except BaseException:  # Ctrl-C in a test too: nothing is to be left
            self.stop()
            raise
        return self

    def __enter__(self) -> ComfyUI:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, seconds: float = 10.0) -> None:
        """End the process as Ctrl-C does, then less gently."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(seconds)

    def queue(self, prompt: dict[str, Any], **extra_data: Any) -> Run:
        """Queue a prompt in API form. Raises `Refused` when ComfyUI's validation does not take it."""
        started = time.monotonic()
        body = {"prompt": prompt, "client_id": self.client_id, "extra_data": extra_data}
        prompt_id = str(uuid.uuid4())
        run = self._runs[prompt_id] = Run(self, prompt_id, started)
        answer = self.post("/prompt", {**body, "prompt_id": prompt_id})
        if answer.get("node_errors") or "error" in answer:
            raise Refused(answer)
        return run

    def run(self, prompt: dict[str, Any], seconds: float = 120.0, **extra_data: Any) -> Run:
        """Queue a prompt and wait for its end."""
        return self.queue(prompt, **extra_data).wait(seconds)

    def interrupt(self) -> None:
        """Press Cancel."""
        self.post("/interrupt", {})

    def get(self, path: str) -> Any:
        """JSON of a GET."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON of a POST, also of one that was refused."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as refusal:
            return json.loads(refusal.read() or b"{}")

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self.port}"

    def log_tail(self, lines: int = 40) -> str:
        """The end of ComfyUI's log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def descendants(self) -> list[psutil.Process]:
        """Every process below ComfyUI: the sidecar and its ranks."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """The processes that compute, without the one that they may be forked from."""
        found = [each for each in self.descendants() if "runtime.worker" in " ".join(each.cmdline())]
        parents = {each.ppid() for each in found}
        return [each for each in found if each.pid not in parents]

    def _command(self) -> list[str]:
        places = ["--base-directory", str(self.base), "--output-directory", str(self.output)]
        where = ["--listen", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, "main.py", *places, *where, "--database-url", "sqlite:///:memory:"]

    def _wait_until_ready(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise TimeoutError(f"ComfyUI did not answer after {seconds} s:\n{self.log_tail()}")

    def _listen(self) -> None:
        address = f"ws://127.0.0.1:{self.port}/ws?clientId={self.client_id}"
        self._socket = websocket.create_connection(address, timeout=30)
        self._socket.settimeout(None)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        current: Run | None = None
        for message in _messages(self._socket):
            event = _event(message)
            run = self._runs.get(event.data.get("prompt_id", ""), current)
            if run is None:
                continue
            current = run
            run.events.append(event)
            if event.kind in ENDS:
                run.done.set()


def install_pack(base: Path, pack: Path = ROOT) -> None:
    """Put the pack under `base`'s custom nodes: a link, or a copy where links are not allowed."""
    custom_nodes = base / "custom_nodes"
    custom_nodes.mkdir(parents=True, exist_ok=True)
    place = custom_nodes / PACK
    if place.is_symlink():
        place.unlink()
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.symlink_to(pack, target_is_directory=True)
    except OSError:
        shutil.copytree(pack, place, ignore=shutil.ignore_patterns(*NOT_PART_OF_THE_PACK))


def gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for processes to end; those that did not."""
    end = time.monotonic() + seconds
    while (left := [each for each in processes if _runs(each)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _messages(connection: websocket.WebSocket) -> Iterator[str | bytes]:
    while True:
        try:
            message = connection.recv()
        except (OSError, websocket.WebSocketException):
            return
        if not message:
            return
        yield message


def _event(message: str | bytes) -> Event:
    now = time.monotonic()
    if isinstance(message, str):
        parsed = json.loads(message)
        return Event(parsed["type"], parsed.get("data") or {}, now)
    (number,) = struct.unpack_from(">I", message)
    if number == TEXT:
        (length,) = struct.unpack_from(">I", message, 4)
        node, text = message[8 : 8 + length].decode(), message[8 + length :].decode()
        return Event("text", {"node": node, "text": text}, now)
    if number == PREVIEW:
        return Event("preview", {"image": message[8:]}, now)
    return Event(f"binary {number}", {}, now)


def _free_port() -> int:
    """A port that is free, below those that systems hand out: another program would have one of those before ComfyUI does."""
    while True:
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port := random.SystemRandom().randrange(20_000, 32_000)))
            return port


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job of a shell's background would ignore Ctrl-C, and pass that on
