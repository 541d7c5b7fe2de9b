"""A stand-in for the parts of ComfyUI that the nodes touch, and the pack loaded on top of it.

ComfyUI itself cannot be imported here: its `nodes.py` and our `nodes/` have one name. What the real one does is tested
against a real server in the `test_comfy_*` files.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "outrigger_under_test"
PARTS = (
    "conditioning",
    "convert",
    "decode",
    "encode",
    "display",
    "files",
    "host",
    "lora",
    "model",
    "parallel",
    "parts",
    "sampler",
    "sampler_advanced",
    "session",
    "truce",
    "verify",
)
LISTED = (".ckpt", ".pt", ".pt2", ".bin", ".pth", ".safetensors", ".pkl", ".sft")
RUNTIME = ("errors", "protocol", "settings")


class FakeInterrupt(Exception):
    """In the place of `InterruptProcessingException`."""


class FakeComfyUI:
    """What the stand-in remembers: the bar, the texts, the mark of Cancel, the model folders and the loaded models."""

    def __init__(self) -> None:
        self.bar: list[tuple[int, int]] = []
        self.previews: list[Any] = []
        self.texts: list[tuple[str, str]] = []
        self.interrupted = False
        self.folders: dict[str, list[Path]] = {}
        self.device, self.held = "cpu", []

    def update_bar(self, value: int, total: int, preview: Any = None) -> None:
        """As ComfyUI's hook: raises, and takes the mark back, after Cancel."""
        if self.interrupted:
            self.interrupted = False
            raise FakeInterrupt
        self.bar.append((value, total))
        self.previews.append(preview)

    def files(self, folder: str) -> list[str]:
        """As `folder_paths.get_filename_list`, which lists weights by these ends of their names."""
        found = [(root, path) for root in self.folders.get(folder, []) for path in root.rglob("*")]
        return sorted(path.relative_to(root).as_posix() for root, path in found if path.suffix in LISTED)

    def path(self, folder: str, name: str) -> str | None:
        """As `folder_paths.get_full_path`."""
        return next((str(root / name) for root in self.folders.get(folder, []) if (root / name).is_file()), None)


def fake_modules(fake: FakeComfyUI) -> dict[str, ModuleType]:
    """ComfyUI's modules by name, as far as the nodes touch them."""
    method = SimpleNamespace(NoPreviews="none", Latent2RGB="latent2rgb", TAESD="taesd")
    arguments = SimpleNamespace(preview_size=512, preview_method=method.NoPreviews)
    server = SimpleNamespace(client_id="c", send_progress_text=lambda text, node, sid: fake.texts.append((node, text)))
    socket = SimpleNamespace(Input=SimpleNamespace, Output=SimpleNamespace)
    return {
        "comfy": _module("comfy"),
        "comfy.cli_args": _module("comfy.cli_args", args=arguments, LatentPreviewMethod=method),
        "comfy.model_management": _module(
            "comfy.model_management",
            InterruptProcessingException=FakeInterrupt,
            processing_interrupted=lambda: fake.interrupted,
            interrupt_current_processing=lambda value: setattr(fake, "interrupted", value),
            intermediate_device=lambda: "cpu",
            get_torch_device=lambda: fake.device,
            load_models_gpu=fake.held.extend,
        ),
        "comfy.utils": _module(
            "comfy.utils",
            __file__="comfy/utils.py",
            ProgressBar=lambda total, node_id: SimpleNamespace(update_absolute=fake.update_bar),
        ),
        "comfyui_version": _module("comfyui_version", __version__="0.3.75"),
        "folder_paths": _module(
            "folder_paths",
            get_filename_list=fake.files,
            get_full_path=fake.path,
            get_folder_paths=lambda folder: [str(root) for root in fake.folders.get(folder, [])],
        ),
        "server": _module("server", PromptServer=SimpleNamespace(instance=server)),
        "comfy_api": _module("comfy_api"),
        "comfy_api.latest": _module(
            "comfy_api.latest",
            ComfyExtension=type("ComfyExtension", (), {}),
            io=SimpleNamespace(
                ComfyNode=type("ComfyNode", (), {"hidden": SimpleNamespace(unique_id="7")}),
                Custom=lambda name: socket,
                NodeOutput=lambda *values, ui=None: values,
                Schema=SimpleNamespace,
                Input=object,
            ),
        ),
    }


@contextmanager
def loaded_pack() -> Iterator[SimpleNamespace]:
    """The pack's modules on a fresh stand-in, `fake` beside them; everything is taken back at the end."""
    fake = FakeComfyUI()
    before = dict(sys.modules)
    modules = fake_modules(fake)
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    try:
        yield SimpleNamespace(fake=fake, **_load())
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in {NAME, *(each.split(".")[0] for each in modules)}:
                del sys.modules[name]


def _load() -> dict[str, ModuleType]:
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "__init__.py")
    root = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = root
    spec.loader.exec_module(root)
    found = {part: sys.modules.get(f"{NAME}.nodes.{part}") for part in PARTS}  # None where a package is missing
    runtime = {f"runtime_{part}": sys.modules.get(f"{NAME}.runtime.{part}") for part in RUNTIME}
    return {"root": root, **found, **runtime}


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module
