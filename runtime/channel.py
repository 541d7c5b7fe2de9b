"""Typed messages over ZMQ sockets: encoding, checks and endpoints, no meaning.

A message is [header, frame, frame ...]. The header is MessagePack of `{"v": version, **fields}`, with a `TensorRef` in
the place of each tensor; a frame is a tensor's bytes.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import zmq
from pydantic import ValidationError

from .errors import ProtocolError, Refused
from .message import MAX_HEADER_BYTES, MAX_TENSOR_BYTES, MAX_TENSORS, Message, TensorRef
from .pool import SMALLEST_BYTES, Mappings, Pool, bytes_of, tensor_over
from .protocol import PROTOCOL_VERSION

if TYPE_CHECKING:
    import torch

LINGER_MS = 2000
MAX_IPC_PATH = 107
UNPACK_LIMITS = {
    "use_list": False, "max_str_len": 1 << 18, "max_array_len": 1 << 16, "max_map_len": 64, "max_bin_len": 0, "max_ext_len": 0,
}  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_JOB = re.compile(r"[a-z0-9-]{1,64}")

Frames = list[Any]
"""What a socket sends (bytes and buffers) or received (`zmq.Frame`)."""
AnyMessage = TypeVar("AnyMessage", bound=Message)


# Message -> frames --------------------------------------------------------------------------------------------------


def encode(message: Message, *, pool: Pool | None = None) -> tuple[Frames, list[TensorRef]]:
    """The frames of a message, and where its tensors went.

    Frames are views of the tensors' own memory: leave the tensors as they are until the frames have been sent.
    """
    frames: Frames = [b""]
    refs: list[TensorRef] = []
    header = {"v": PROTOCOL_VERSION, **message.model_dump()}
    frames[0] = msgpack.packb(header, default=partial(_place_tensor, frames=frames, refs=refs, pool=pool))
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(frames[0])} bytes is over the limit of {MAX_HEADER_BYTES}")
    return frames, refs


def _place_tensor(tensor: torch.Tensor, *, frames: Frames, refs: list[TensorRef], pool: Pool | None) -> dict[str, Any]:
    nbytes = tensor.numel() * tensor.element_size()
    segment = pool.put(tensor) if pool is not None and nbytes >= SMALLEST_BYTES else None
    if segment is None:
        frames.append(bytes_of(tensor))
    ref = TensorRef(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        nbytes=nbytes,
        frame=len(frames) - 1 if segment is None else None,
        segment=segment,
    )
    refs.append(ref)
    return ref.model_dump()


# Frames -> message --------------------------------------------------------------------------------------------------


def parse(frames: Frames, validate: Callable[[dict[str, Any]], AnyMessage]) -> AnyMessage:
    """The message with its `TensorRef`s, every size and count checked; no tensor is made.

    Raises `ProtocolError`, with the job where it can be read.
    """
    header = _unpack(frames[0].buffer)
    named = header.get("job")
    job = named if isinstance(named, str) and _JOB.fullmatch(named) else ""
    version = header.pop("v", None)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"a message of protocol version {version!r}; this side speaks {PROTOCOL_VERSION}", job=job)
    try:
        message = validate(header)
    except ValidationError as error:
        raise ProtocolError(f"not a valid message: {problems_of(error)}", job=job) from None
    _check_frames(frames, message, job=job)
    return message


def decode(message: AnyMessage, frames: Frames, *, mappings: Mappings, give_back: bool) -> AnyMessage:
    """The message with tensors over the received memory. Raises `ProtocolError` for a segment that is not there."""

    def tensor(ref: TensorRef) -> torch.Tensor:
        return mappings.tensor(ref, give_back=give_back) if ref.segment else _tensor_in(frames[ref.frame or 0], ref)

    return _replace(message, tensor)


def references(value: Any) -> Iterator[TensorRef]:
    """Every `TensorRef` in a message."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from references(item)
    elif isinstance(value, Message):
        for name in type(value).model_fields:
            yield from references(getattr(value, name))


def problems_of(error: ValidationError) -> str:
    """What is wrong and where, without the values: they may hold a prompt."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'message'}: {problem['msg']}" for problem in problems[:5])


def _unpack(raw: Any) -> dict[str, Any]:
    if len(raw) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(raw)} bytes is over the limit of {MAX_HEADER_BYTES}")
    try:
        header = msgpack.unpackb(raw, **UNPACK_LIMITS)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"the header is not MessagePack: {type(error).__name__}") from error
    if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
        raise ProtocolError("the header is not a map of names")
    return header


def _check_frames(frames: Frames, message: Message, *, job: str) -> None:
    refs = list(references(message))
    if len(refs) > MAX_TENSORS:
        raise ProtocolError(f"{len(refs)} tensors are over the limit of {MAX_TENSORS}", job=job)
    framed = sorted((ref for ref in refs if ref.frame), key=lambda ref: ref.frame or 0)
    if [ref.frame for ref in framed] != list(range(1, len(frames))):
        raise ProtocolError(f"the header names {len(framed)} frames, {len(frames) - 1} came", job=job)
    for ref in framed:
        size = len(frames[ref.frame or 0])
        if size != ref.nbytes:
            raise ProtocolError(f"frame {ref.frame} has {size} bytes, the header says {ref.nbytes}", job=job)


def _replace(value: Any, tensor: Callable[[TensorRef], Any]) -> Any:
    if isinstance(value, TensorRef):
        return tensor(value)
    if isinstance(value, tuple):
        return tuple(_replace(item, tensor) for item in value)
    if isinstance(value, Message):
        return value.model_copy(update={n: _replace(getattr(value, n), tensor) for n in type(value).model_fields})
    return value


def _tensor_in(frame: zmq.Frame, ref: TensorRef) -> torch.Tensor:
    import numpy

    array = numpy.frombuffer(frame.buffer, dtype=numpy.uint8)
    aligned = array.ctypes.data % 8 == 0
    return tensor_over(array if aligned else array.copy(), ref)


# Sockets ------------------------------------------------------------------------------------------------------------


class Connection:
    """The end of one peer: a DEALER. Used by one thread at a time."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, *, identity: str = "") -> None:
        self.socket = _new_socket(context, zmq.DEALER)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.connect(endpoint)

    def send(self, frames: Frames) -> None:
        """Queue the frames for the other side."""
        self.socket.send_multipart(frames, copy=False)

    def receive(self, *, seconds: float | None = None) -> Frames | None:
        """The next message's frames; None when none came in time. Waits for ever without `seconds`."""
        if self.socket.poll(None if seconds is None else int(seconds * 1000)):
            return self.socket.recv_multipart(copy=False)
        return None

    def close(self) -> None:
        """Close; what is queued is still sent for a while."""
        self.socket.close()


class Listener:
    """The end that many peers connect to: a ROUTER bound to `endpoint`. Raises `Refused` when it cannot be."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        check_endpoint(endpoint)
        self.socket = _new_socket(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is an error, not a silent drop
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            raise Refused(f"cannot listen on {endpoint}: {error.strerror}; choose another --endpoint") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Queue the frames for `peer`; False when it is gone."""
        try:
            self.socket.send_multipart([peer, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def receive(self) -> tuple[bytes, Frames]:
        """The next message: who sent it, and its frames."""
        peer, *frames = self.socket.recv_multipart(copy=False)
        return peer.bytes, frames or [zmq.Frame(b"")]

    def close(self) -> None:
        """Close; what is queued is still sent for a while."""
        self.socket.close()


class Bell:
    """Wakes a loop that waits on sockets; may be rung from any thread."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context, self._endpoint = context, f"inproc://bell-{id(self)}"
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self._endpoint)

    def ring(self, why: str) -> None:
        """Have `answer` return `why` in the loop's thread."""
        with self._context.socket(zmq.PUSH) as pusher:
            pusher.connect(self._endpoint)
            pusher.send_string(why)

    def answer(self) -> str:
        """Why the bell was rung; waits until it is."""
        return self.socket.recv_string()

    def close(self) -> None:
        """Close the loop's end."""
        self.socket.close(linger=0)


def check_endpoint(endpoint: str) -> None:
    """Raise `Refused` when `endpoint` is not one that we may listen on, or another process does."""
    kind, _, address = endpoint.partition("://")
    if kind == "ipc" and address:
        _check_ipc(Path(address))
    elif (
        kind != "tcp"
        or not re.fullmatch(r".+:(\*|[0-9]{1,5})", address)
        or int(address.rpartition(":")[2].replace("*", "0")) > 65535
    ):
        raise Refused(f"endpoint {endpoint!r} is neither ipc:///path/of/socket nor tcp://127.0.0.1:PORT")
    elif address.rpartition(":")[0] not in LOOPBACK:
        raise Refused(
            f"endpoint {endpoint} can be reached from other machines, and there is no authentication for that yet: "
            "use tcp://127.0.0.1:PORT or ipc://"
        )


def _check_ipc(path: Path) -> None:
    if str(path).startswith("@"):
        raise Refused(f"ipc://{path} is an abstract socket, which any user can reach: use a path")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise Refused(f"the socket path {path} is over {MAX_IPC_PATH} bytes: choose a shorter one, or a shorter TMPDIR")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise Refused(f"cannot make a socket in {path.parent}: it is not a folder that can be written to")
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise Refused(f"{path} exists and is not a socket: choose another --endpoint")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:  # ZMQ would take it from the process that listens there
            raise Refused(f"ipc://{path} is in use by another process: end that one, or choose another --endpoint")


def _new_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    made = context.socket(kind)
    made.setsockopt(zmq.MAXMSGSIZE, min(MAX_TENSOR_BYTES, _memory_bytes()))
    made.setsockopt(zmq.SNDHWM, 0)  # no limit: a full queue would block the loop, or drop in silence
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    return made


def _memory_bytes() -> int:
    if not hasattr(os, "sysconf"):
        return MAX_TENSOR_BYTES
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
