"""Run a function on several ranks as real processes over gloo: `python -m tests.processes MODULE:FUNCTION FOLDER RANK DEGREES`."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from runtime.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 300


def run_ranks(module: str, arguments: Sequence[Sequence[str]], *, seconds: float = TIMEOUT_SECONDS) -> None:
    """Run `python -m MODULE ARGUMENTS` for the arguments of each rank, all at once, and wait. Raises what one of them said
    when it fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([sys.executable, "-m", module, *each], **options) for each in arguments]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=seconds)
            if process.returncode:
                raise RuntimeError(output)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_as_processes(function: str, degrees: dict[str, int], folder: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors by name that `function(mesh, folder)` gives on each rank. `function` is "module:name"."""
    ranks = range(math.prod(degrees.values()))
    run_ranks("tests.processes", [[function, str(folder), str(rank), json.dumps(degrees)] for rank in ranks])
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in ranks]


def main(function: str, folder: Path, rank: int, degrees: dict[str, int]) -> None:
    """One process; its tensors go to `rank-N.safetensors`."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays, and need not be gone through after each load
    mesh = Mesh.join(degrees, rank=rank, device="cpu", init_method=f"file://{folder / 'store'}")
    module, _, name = function.partition(":")
    results = getattr(importlib.import_module(module), name)(mesh, folder)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, folder / f"rank-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
