"""Ask the real ComfyUI, in a process of its own, what it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).with_name("stock_comfyui.py")


def comfyui_path() -> Path:
    """ComfyUI's folder; skips the test where there is none."""
    path = os.environ.get("COMFYUI_PATH", "")
    if not (Path(path) / "comfy" / "samplers.py").is_file():
        pytest.skip(f"needs a ComfyUI tree: COMFYUI_PATH is {path!r}")
    return Path(path).resolve()


def ask_comfyui(
    folder: Path,
    *,
    inputs: dict[str, torch.Tensor] | None = None,
    options: tuple[str, ...] = (),
    **cases: list[dict],
) -> dict[str, torch.Tensor]:
    """Results by kind and number: "sigmas.0", "noise.2", "samples.5"; see `stock_comfyui`. `options` are ComfyUI's own."""
    request, given, results = (folder / name for name in ("request.json", "inputs.safetensors", "results.safetensors"))
    request.write_text(json.dumps(cases))
    save_file(inputs or {"none": torch.zeros(1)}, given)
    environment = os.environ | {"COMFYUI_PATH": str(comfyui_path())}
    command = [sys.executable, str(SCRIPT), str(request), str(given), str(results), *options]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-4000:]
    return load_file(results)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, as a part of the largest value (as it is, where all should be zero)."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} is not {tuple(theirs.shape)}"
    return float((ours - theirs).abs().max() / (theirs.abs().max() or 1.0))
