"""The server, with ranks that pretend and a plan that takes `devices` at its word."""

import logging
import os
import sys
from pathlib import Path

from runtime import executor
from runtime.plan import Plan
from runtime.rank_settings import KeepSettings
from runtime.server import Server, run_server


def plan_for(work, held):
    parallel = work.model.parallel
    count, on_gpus = parallel.device_count or 1, parallel.devices.startswith("cuda")
    devices = tuple(f"cuda:{number}" if on_gpus else "cpu" for number in range(count))
    return Plan(data=1, cfg=count, ring=1, ulysses=1, tensor=1, devices=devices, bytes_per_rank=5 << 20)


if __name__ == "__main__":
    executor.CANCELLED_SECONDS = float(os.environ.get("FAKE_CANCELLED_SECONDS", executor.CANCELLED_SECONDS))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    worker = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
    endpoint = sys.argv[1] if len(sys.argv) > 1 else ""
    keep = KeepSettings.from_environment(os.environ)
    sys.exit(run_server(Server(endpoint, plan_for=plan_for, command=worker, keep=keep), stdin_guard=True))
