"""Run a function on several ranks as real processes over gloo: `python -m tests.processes MODULE:FUNCTION FOLDER DEGREES KIND`.

The process that is started imports what they need, and its children are the ranks: to import takes longer than most of what
they are asked. On devices of KIND "cuda" each starts anew, and speaks over NCCL.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from runtime.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 600

Work = Callable[[Mesh, Path], dict[str, torch.Tensor]]


def run_as_processes(
    function: str, degrees: dict[str, int], folder: Path, *, kind: str = "cpu"
) -> list[dict[str, torch.Tensor]]:
    """The tensors by name that `function(mesh, folder)` gives on each rank. `function` is "module:name". Raises what a rank
    said when one fails.
    """
    command = [sys.executable, "-m", "tests.processes", function, str(folder), json.dumps(degrees), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **options, start_new_session=True) as starter:
        try:
            output, _ = starter.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            _kill_all(starter)
    if starter.returncode:
        raise RuntimeError(output)
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(math.prod(degrees.values()))]


def _kill_all(starter: subprocess.Popen) -> None:
    if os.name == "posix":
        with suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)
    starter.kill()


def start(function: str, folder: Path, degrees: dict[str, int], kind: str) -> int:
    """Start the ranks and wait for them; the first that fails ends the others. The exit status."""
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    context = multiprocessing.get_context("fork" if kind == "cpu" and sys.platform == "linux" else "spawn")
    ranks = [
        context.Process(target=run_rank, args=(work, folder, rank, degrees, kind), daemon=True)
        for rank in range(math.prod(degrees.values()))
    ]
    for rank in ranks:
        rank.start()
    while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        wait(running)
        if any(rank.exitcode for rank in ranks):
            return 1
    return 0


def run_rank(work: Work, folder: Path, rank: int, degrees: dict[str, int], kind: str) -> None:
    """One rank; its tensors go to `rank-N.safetensors`."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays, and need not be gone through after each load
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    mesh = Mesh.join(degrees, rank=rank, device=device, init_method=f"file://{folder / 'store'}")
    results = work(mesh, folder)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, folder / f"rank-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(start(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]))
