"""The sidecar ends with its host, in every way in which the host can end; alone it ends when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.sidecars import fake_sidecar, still_there

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="these are the ways in which a POSIX process ends")

HOST = """
import json, os, signal, sys, time
from tests.sidecars import FAKE_SERVER, Sidecar, folders_of, never, rank_pids, run, sample

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell's background inherits that it is ignored
sidecar = Sidecar.start(log=lambda line: None, command=FAKE_SERVER)
run(sidecar, sample(ranks=2, shape=(1, 16, 512, 512)))
print(json.dumps([sidecar.status().pid, *rank_pids(sidecar)]), flush=True)
print(json.dumps([str(path) for path in folders_of(sidecar)]), flush=True)
job = sidecar.call(sample("fake?step=0.2", ranks=2, steps=1000), interrupted=never)
for event in job:
    if getattr(event, "stage", "") == "sampling":
        print("sampling", flush=True)
        break
if sys.argv[1] == "exec":
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(30)"])
for event in job:
    pass
"""


def host(way):
    """A program in the middle of a job on a sidecar; the sidecar's processes, and its folders."""
    process = subprocess.Popen([sys.executable, "-c", HOST, way], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids, folders = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
    assert process.stdout.readline().strip() == "sampling"
    return process, [psutil.Process(pid) for pid in pids], [Path(folder) for folder in folders]


def left_of(folders, *, within):
    """Which of the folders are there still after that many seconds."""
    deadline = time.monotonic() + within
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [folder for folder in folders if folder.exists()]


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGKILL", "exec"])
def test_nothing_of_ours_is_left_when_the_host_ends(way):
    process, sidecar, folders = host(way)
    started = time.monotonic()
    if way != "exec":
        process.send_signal(getattr(signal, way))
    assert len(sidecar) == 3 and not still_there(sidecar, within=5)
    assert not left_of(folders, within=5 - (time.monotonic() - started))
    process.kill()
    process.wait()


def test_what_is_left_when_everything_is_killed_is_swept_at_the_next_start():
    process, sidecar, folders = host("SIGKILL")
    for victim in (sidecar[0], process):
        victim.kill()
    process.wait()
    assert not still_there(sidecar, within=5)
    with fake_sidecar():
        assert not left_of(folders, within=0)


def serve(*arguments, stdin=subprocess.DEVNULL):
    command = [sys.executable, "-m", "runtime", "serve", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_alone_it_prints_its_address_and_ends_in_good_order_on_a_signal(number):
    process = serve()
    address = json.loads(process.stdout.readline())
    assert address["endpoint"].startswith("ipc://") and len(address["token"]) == 32
    time.sleep(0.3)
    assert process.poll() is None  # though its standard input has ended
    process.send_signal(number)
    assert process.wait(30) == 0
    assert not Path(address["endpoint"].removeprefix("ipc://")).parent.exists()


def test_on_loopback_it_says_which_port():
    process = serve("--endpoint", "tcp://127.0.0.1:*")
    endpoint = json.loads(process.stdout.readline())["endpoint"]
    assert endpoint.startswith("tcp://127.0.0.1:") and int(endpoint.rpartition(":")[2]) > 0
    process.terminate()
    assert process.wait(30) == 0


def test_with_the_guard_it_ends_with_its_standard_input():
    process = serve("--stdin-guard", stdin=subprocess.PIPE)
    assert process.stdout.readline()
    process.stdin.close()
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--endpoint", "tcp://0.0.0.0:5555"], "no authentication"),
        (["--endpoint", "tcp://127.0.0.1:99999"], "is neither"),
        (["--endpoint", "ipc://@abstract"], "abstract socket"),
        (["--endpoint", "ipc:///nowhere/socket"], "/nowhere"),
        (["--endpoint", "ipc:///proc/socket"], "/proc"),
        (["--endpont", "ipc:///tmp/x"], "did you mean --endpoint?"),
        (["--stdin-gaurd"], "did you mean --stdin-guard?"),
    ],
)
def test_a_start_that_cannot_be_gives_one_line_with_the_way_out(arguments, said):
    process = serve(*arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 2) and said in errors and "Traceback" not in errors


def test_a_socket_in_use_is_named(tmp_path):
    first = serve("--endpoint", f"ipc://{tmp_path}/socket")
    assert first.stdout.readline()
    _, errors = serve("--endpoint", f"ipc://{tmp_path}/socket").communicate(timeout=60)
    assert f"ipc://{tmp_path}/socket is in use" in errors and "choose another --endpoint" in errors
    first.terminate()
    first.wait(5)


def test_a_temporary_folder_that_cannot_be_written_is_named(tmp_path):
    program = (
        "import tempfile, sys; tempfile.tempdir = '/proc'; from runtime.__main__ import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "private folder /proc/" in done.stderr and "TMPDIR" in done.stderr


def test_the_nearest_command_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "benhc"], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and "did you mean bench?" in done.stderr
