"""How fast a large tensor crosses from a worker to a node: through the pool, in our frames, in plain pyzmq frames.

Every way runs between the same two processes, in turns, beside a copy inside one process: `memcpy`, the most there can be.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zmq

from ..channel import Connection, Listener, decode, encode, parse
from ..folders import SHARED_MEMORY, PrivateFolder
from ..pool import Mappings, Pool
from ..protocol import Sampled, event_from

SIZE_BYTES = 512 << 20
ROUNDS = 5
WAYS = ("memcpy", "pool_cold", "pool", "frames", "pyzmq")
PACK_ROOT = Path(__file__).resolve().parents[2]


def measure(*, size: int = SIZE_BYTES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Median GiB/s of each way, all in one run."""
    if not SHARED_MEMORY.is_dir():
        raise ValueError(f"there is no {SHARED_MEMORY} on this machine: tensors travel in frames, nothing to compare")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    folder = PrivateFolder(SHARED_MEMORY)
    with tempfile.TemporaryDirectory() as home, zmq.Context() as context:
        listener, mappings = Listener(context, f"ipc://{home}/bench"), Mappings(folder.path)
        command = [sys.executable, "-m", __name__, listener.endpoint, folder.path.name, str(size)]
        sender = subprocess.Popen(command, cwd=PACK_ROOT, stdin=subprocess.PIPE)
        try:
            peer, _ = listener.receive()
            copy = _Memcpy(size)
            for number in range(rounds + 2):  # the pool is warm once its segment has been made, and mapped
                for way in WAYS[:: 1 - 2 * (number % 2)]:  # back and forth, so that no way always follows the same
                    seconds[way].append(copy() if way == "memcpy" else _one_way(listener, peer, mappings, way))
        finally:
            sender.kill()
            sender.wait()
            listener.close()
            folder.remove()
    return _figures({way: times[2:] for way, times in seconds.items()}, size)


def described(figures: dict[str, Any]) -> str:
    """The figures for reading."""
    lines = [f"{name.removesuffix('_gib_s'):10} {value:6.2f} GiB/s" for name, value in figures.items() if "gib" in name]
    return "\n".join(
        [f"{figures['size_bytes'] >> 20} MiB from one process to another, median of {figures['rounds']}:", *lines]
    )


def _figures(seconds: dict[str, list[float]], size: int) -> dict[str, Any]:
    rates = {f"{way}_gib_s": round(size / statistics.median(times) / 2**30, 3) for way, times in seconds.items()}
    return {**rates, "size_bytes": size, "rounds": len(seconds["pool"])}


class _Memcpy:
    """Seconds of a copy inside one process, of memory that has been used before."""

    def __init__(self, size: int) -> None:
        self._source, self._target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def __call__(self) -> float:
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started


def _one_way(listener: Listener, peer: bytes, mappings: Mappings, way: str) -> float:
    """Seconds from the sender's start of encoding until the tensor is here and its first and last number are read."""
    listener.send(peer, [way.encode()])
    _, frames = listener.receive()
    if way == "pyzmq":
        tensor = torch.frombuffer(frames[1].buffer, dtype=torch.float32)
    else:
        tensor = decode(parse(frames, event_from), frames, mappings=mappings, give_back=True).latent
    assert float(tensor[0]) == float(tensor[-1]) == 1.0
    arrived = time.perf_counter()  # one clock for all processes of a machine
    del tensor, frames
    listener.send(peer, [b"began?"])
    _, frames = listener.receive()
    return arrived - float(frames[0].bytes)


def _send_as_told(endpoint: str, folder: str, size: int) -> None:
    """The worker's side: send the same tensor the way it is told."""
    tensor = torch.ones(size // 4)
    connection = Connection(zmq.Context.instance(), endpoint)
    connection.send([b"here"])
    pool, cold, began = _pool(folder, size), _pool(folder, size), 0.0
    message = Sampled(job="bench", latent=tensor, seconds=0.0)
    while True:
        (way,) = connection.receive() or [zmq.Frame(b"")]
        match way.bytes.decode():
            case "began?":
                cold.close()
                connection.send([repr(began).encode()])
            case "pool_cold":
                cold = _pool(folder, size)
                began = time.perf_counter()
                connection.send(encode(message, pool=cold)[0])
            case "pool":
                began = time.perf_counter()
                connection.send(encode(message, pool=pool)[0])
            case "frames":
                began = time.perf_counter()
                connection.send(encode(message)[0])
            case "pyzmq":
                began = time.perf_counter()
                connection.socket.send_multipart([b"header", memoryview(tensor.numpy())], copy=False)


def _pool(folder: str, size: int) -> Pool:
    return Pool(SHARED_MEMORY / folder, owner="bench", limit=2 * size + (64 << 20))


if __name__ == "__main__":
    _send_as_told(sys.argv[1], sys.argv[2], int(sys.argv[3]))
