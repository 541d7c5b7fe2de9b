"""How the sidecar lives and dies with ComfyUI: every way that ComfyUI can end, and two of it side by side."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.comfyui import ComfyUI, gone
from tests.graphs import SAMPLER, picture, slow

pytestmark = [pytest.mark.comfy, pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")]

SECONDS = 5.0
"""How soon nothing of ours may be left."""

RESTART = '''
"""As the Manager restarts ComfyUI: the same process becomes a new ComfyUI."""
import os, sys, threading
from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS = {}

@PromptServer.instance.routes.post("/restart")
async def restart(request):
    threading.Timer(0.2, lambda: os.execv(sys.executable, [sys.executable, *sys.argv])).start()
    return web.json_response({})
'''


@pytest.fixture
def server(comfyui_tree: Path, tmp_path: Path) -> Iterator[ComfyUI]:
    """A ComfyUI of its own, whose sidecar and ranks run; what it leaves is ended at last."""
    (tmp_path / "custom_nodes" / "restart").mkdir(parents=True)
    (tmp_path / "custom_nodes" / "restart" / "__init__.py").write_text(textwrap.dedent(RESTART))
    with ComfyUI(comfyui_tree, tmp_path) as server:
        run = server.run(picture())
        assert run.end.kind == "execution_success", run.end.data
        ours = server.descendants()
        assert len(ours) >= 3  # the sidecar and two ranks
        yield server
        for process in gone(ours, 0.0):
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in mid-step"])
def test_no_process_is_left_after_comfyui_ends(server: ComfyUI, how: signal.Signals, busy: bool):
    if busy:
        server.queue(slow()).wait_for("progress", node=SAMPLER, count=2)
    ours = server.descendants()
    server.process.send_signal(how)
    server.process.wait(30)
    ended = time.monotonic()
    left = gone(ours, SECONDS)
    print(f"after {how.name} nothing of ours was left {time.monotonic() - ended:.2f} s after ComfyUI ended")
    assert left == [], [process.cmdline() for process in left]


def test_no_process_of_before_is_left_after_a_restart_in_place(server: ComfyUI):
    ours = server.descendants()
    server.post("/restart", {})
    left = gone(ours, SECONDS)
    assert left == [], [process.cmdline() for process in left]
    assert server.process.poll() is None


def test_ranks_end_with_a_sidecar_that_is_killed(server: ComfyUI):
    (sidecar,) = psutil.Process(server.process.pid).children()
    ranks = server.ranks()
    sidecar.kill()
    assert gone(ranks, SECONDS) == []


def test_two_comfyui_run_side_by_side_each_with_its_own_sidecar(server: ComfyUI, comfyui: ComfyUI):
    runs = [server.queue(picture(SAMPLER={"seed": 71})), comfyui.queue(picture(SAMPLER={"seed": 71}))]
    assert [run.wait().end.kind for run in runs] == ["execution_success"] * 2
    assert [len(run.of("preview")) for run in runs] == [0, 4]  # each as its ComfyUI was started
    first, second = ({process.pid for process in each.descendants()} for each in (server, comfyui))
    assert first and second and not first & second
    pictures = [run.images()[0].read_bytes() for run in runs]
    server.stop()
    assert comfyui.run(picture(SAMPLER={"seed": 72})).end.kind == "execution_success"
    assert pictures[0][-4096:] == pictures[1][-4096:]  # the last of the pixels: metadata comes first
