"""Run a function on several ranks as real processes over gloo: `python -m tests.processes MODULE:FUNCTION FOLDER RANK DEGREES`."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from runtime.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 300


def run_as_processes(function: str, degrees: dict[str, int], folder: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors by name that `function(mesh, folder)` gives on each rank. `function` is "module:name"."""
    command = [sys.executable, "-m", "tests.processes", function, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), json.dumps(degrees)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(math.prod(degrees.values()))
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            if process.returncode:
                raise RuntimeError(output)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(len(processes))]


def main(function: str, folder: Path, rank: int, degrees: dict[str, int]) -> None:
    """One process; its tensors go to `rank-N.safetensors`."""
    torch.set_num_threads(1)
    mesh = Mesh.join(degrees, rank=rank, device="cpu", init_method=f"file://{folder / 'store'}")
    module, _, name = function.partition(":")
    results = getattr(importlib.import_module(module), name)(mesh, folder)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, folder / f"rank-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
