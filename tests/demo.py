"""Run a workflow on a real ComfyUI with this pack, from nothing: start it, queue, show progress, name the picture.

usage: demo.py [WORKFLOW.json] | demo.py --serve [--port N]
with COMFYUI_PATH naming ComfyUI's folder. Needs no browser; `nox -s demo` and `nox -s serve` call it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from comfyui import PACK, ROOT, ComfyUI, Event, Run

BASE = ROOT / "build" / "comfyui"
OUTPUT = ROOT / "output"
WORKFLOW = ROOT / "workflows" / "api" / "text_to_image.json"


def main() -> int:
    """Read the command line and do it; the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ComfyUI ends with this process
    began = time.monotonic()
    server = ComfyUI(Path(os.environ["COMFYUI_PATH"]), BASE, arguments=_arguments(), output=OUTPUT, port=options.port)
    _say(f"starting ComfyUI ({server.tree}); its log is {server.log}")
    with server:
        started = time.monotonic() - began
        if options.serve:
            return _serve(server)
        return _run(server, json.loads(options.workflow.read_text(encoding="utf-8")), started)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workflow", nargs="?", type=Path, default=WORKFLOW, help="a workflow in API form")
    parser.add_argument("--serve", action="store_true", help="leave ComfyUI open for a browser")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    return parser.parse_args()


def _arguments() -> tuple[str, ...]:
    return () if torch.cuda.is_available() or torch.backends.mps.is_available() else ("--cpu",)


def _serve(server: ComfyUI) -> int:
    _say(f"open {server.url} - Workflow > Browse Templates > {PACK} has the templates. Ctrl-C ends it.")
    try:
        return server.process.wait()
    except KeyboardInterrupt:
        return 0


def _run(server: ComfyUI, prompt: dict[str, Any], started: float) -> int:
    run = server.queue(prompt)
    names = {node: _title(entry) for node, entry in prompt.items()}
    shown = 0
    while not run.done.is_set() or shown < len(run.events):
        for event in run.events[shown:]:
            _show(event, names)
            shown += 1
        time.sleep(0.02)
    if run.end.kind != "execution_success":
        _say(
            f"{names.get(run.end.data.get('node_id'), 'ComfyUI')}: {run.end.data.get('exception_message', run.end.kind)}"
        )
        return 1
    _summary(run, names, started)
    return 0


def _show(event: Event, names: dict[str, str]) -> None:
    name = names.get(str(event.data.get("node")), "")
    match event.kind:
        case "executing" if name:
            _say(name)
        case "text":
            _say(f"  {event.data['text']}")
        case "progress":
            value, total = event.data["value"], event.data["max"]
            bar = "#" * round(30 * value / total)
            _say(f"  [{bar:<30}] {value}/{total}")


def _summary(run: Run, names: dict[str, str], started: float) -> None:
    _say("\nseconds")
    rows = [("start ComfyUI", started), *((names[node], seconds) for node, seconds in run.seconds().items())]
    for name, seconds in rows:
        _say(f"  {name:<36}{seconds:8.2f}")
    for path in run.images():
        _say(f"wrote {path}")


def _title(entry: dict[str, Any]) -> str:
    return entry.get("_meta", {}).get("title", entry["class_type"])


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
