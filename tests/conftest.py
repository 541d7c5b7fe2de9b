"""What the tests share: one thread per process, the pack as ComfyUI loads it, and a running ComfyUI."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks of a test are processes that share few cores


def pytest_configure(config: pytest.Config) -> None:
    """A run that is told to end takes its servers with it, and those of the processes among which it has divided the tests."""

    def end(*_: object) -> None:
        for process in psutil.Process().children() if config.getoption("numprocesses", None) else ():
            process.terminate()
        pytest.exit("told to end", returncode=143)

    signal.signal(signal.SIGTERM, end)


def pytest_collection_finish() -> None:
    """What the libraries have made stays: going through it each time that a model is loaded would take most of the run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def pack() -> Iterator[SimpleNamespace]:
    """The nodes' modules, loaded as ComfyUI loads a pack, around a stand-in for ComfyUI; see `fake_comfyui`."""
    from tests.fake_comfyui import loaded_pack

    with loaded_pack() as modules:
        yield modules


@pytest.fixture(scope="session")
def comfyui_tree() -> Path:
    """ComfyUI's folder; skips the test where there is none."""
    from tests.stock import comfyui_path

    return comfyui_path()


@pytest.fixture(scope="session")
def comfyui(comfyui_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """One running ComfyUI with this pack, previews and `tiny_clip`, for all tests that leave it as they found it."""
    from tests.comfyui import ComfyUI

    base = tmp_path_factory.mktemp("comfyui")
    shutil.copytree(Path(__file__).with_name("tiny_clip"), base / "custom_nodes" / "tiny_clip")
    with ComfyUI(comfyui_tree, base, arguments=("--cpu", "--preview-method", "latent2rgb")) as server:
        yield server
