"""ComfyUI's internals that this pack touches: all of them, here and nowhere else. A test checks that each is there.

Besides these the nodes use `comfy_api.latest`, which is ComfyUI's public interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.model_management
import comfy.utils
import comfyui_version
import folder_paths
import server

Interrupted = comfy.model_management.InterruptProcessingException
"""What a node raises when the user pressed Cancel. An `Exception` before ComfyUI 0.20, a `BaseException` since."""


def python() -> str:
    """The Python that ComfyUI runs on, as one types it."""
    return sys.executable or "python"


def interrupted() -> bool:
    """Whether the user pressed Cancel; the mark stays."""
    return comfy.model_management.processing_interrupted()


def interrupt() -> None:
    """Raise ComfyUI's own interrupt, and take its mark back as ComfyUI does."""
    comfy.model_management.interrupt_current_processing(False)
    raise Interrupted()


def progress_bar(total: int, node_id: str | None) -> Callable[..., None]:
    """`update(value, total, preview)` of ComfyUI's progress bar on a node. It raises `Interrupted` after Cancel."""
    return comfy.utils.ProgressBar(total, node_id=node_id).update_absolute


def show_text(text: str, node_id: str | None) -> None:
    """Put a line of text on a node, for the browser that queued the prompt."""
    prompt_server = getattr(server.PromptServer, "instance", None)
    send = getattr(prompt_server, "send_progress_text", None)
    if send is not None and node_id is not None:
        send(text, node_id, prompt_server.client_id)


def preview_kind() -> str:
    """The latent previews that ComfyUI asks for now, by `--preview-method` or the prompt's own setting."""
    methods = comfy.cli_args.LatentPreviewMethod
    kinds = {methods.NoPreviews: "none", methods.TAESD: "taesd"}
    return kinds.get(comfy.cli_args.args.preview_method, "latent2rgb")


def preview_decoders() -> tuple[str, ...]:
    """The files of the folder of small decoders, by absolute path and in the order in which ComfyUI looks at them."""
    found = (model_path("vae_approx", name) for name in model_files("vae_approx"))
    return tuple(str(path.absolute()) for path in found if path)


def preview_size() -> int:
    """Largest side of a preview, in pixels."""
    return comfy.cli_args.args.preview_size


def cpu_noise_offset() -> int:
    """What this ComfyUI adds to the seed of the noise between steps on a CPU: nothing before 0.7, then 1."""
    major, minor = (int(part) for part in comfyui_version.__version__.split(".")[:2])
    return int((major, minor) >= (0, 7))


def to_intermediate(tensor: Any) -> Any:
    """The tensor as ComfyUI keeps what travels between nodes: on the processor, unless told otherwise, and in the precision
    that newer versions have a setting for (`--fp16-intermediates`).
    """
    dtype = getattr(comfy.model_management, "intermediate_dtype", lambda: None)()
    return tensor.to(device=comfy.model_management.intermediate_device(), dtype=dtype)


def compute_device() -> Any:
    """Where ComfyUI computes."""
    return comfy.model_management.get_torch_device()


def hold(model: Any) -> None:
    """Free what a model is to take, and have it among the loaded models, which are asked to let go when memory is short."""
    comfy.model_management.load_models_gpu([model])


def tokenizers() -> str:
    """ComfyUI's own package, which has the tokenizers of its text encoders."""
    return str(Path(comfy.utils.__file__).absolute().parent)


def model_files(folder: str) -> list[str]:
    """Names of the files of a model folder, as ComfyUI lists them."""
    return folder_paths.get_filename_list(folder)


def model_path(folder: str, name: str) -> Path | None:
    """Where a file of a model folder is, or None."""
    found = folder_paths.get_full_path(folder, name)
    return Path(found) if found else None


def model_roots(folder: str) -> list[Path]:
    """The places on disk that make up a model folder."""
    return [Path(root) for root in folder_paths.get_folder_paths(folder)]
