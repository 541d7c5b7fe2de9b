"""Models by name, as ComfyUI keeps them: files and folders under its models folder."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import Refused
from ..families import FAMILIES
from ..inspection import RANDOM
from ..launch import PACK_ROOT
from ..settings import FROM_MODEL, TINY_SHAPES

MODEL_FOLDERS = ("diffusion_models", "unet", "checkpoints", "diffusers")
TEXT_ENCODER_FOLDERS, VAE_FOLDERS = ("text_encoders", "clip", "diffusers"), ("vae", "diffusers")
"""Two of them by their older names, too, as in ComfyUI."""
LORA_FOLDERS = ("loras",)
INDEX = "model_index.json"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)(?<!\.sft)(?<!\.gguf)")
NAMED = 3


def find_model(name: str) -> str:
    """What a `--model` means: `tiny-shapes`, `random:FAMILY`, a path, a name under a models folder, or the id of a model of
    the Hugging Face Hub that is in its cache. Raises `Refused`; nothing is downloaded.
    """
    if name == TINY_SHAPES or name.startswith(RANDOM):
        return name
    try:
        return find_file(name, MODEL_FOLDERS)
    except Refused as refusal:
        if not HUB_ID.fullmatch(name):
            raise
        if folder := _cached(name):
            return os.path.abspath(folder)
        raise Refused(
            f"{refusal}. If it is the id of a model of the Hugging Face Hub: that is not in its cache here, and nothing is "
            f"downloaded. Put the model's folder into models/diffusers, or its .safetensors file into models/diffusion_models"
        ) from None


def _cached(hub_id: str) -> Path | None:
    """The folder of a model of the Hub in the local cache, where it is there, whatever is in it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    home = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=hub_id, repo_type="model"))
    revision = home / "refs" / "main"
    folder = home / "snapshots" / revision.read_text().strip() if revision.is_file() else None
    return folder if folder and folder.is_dir() else None


def find_part(name: str, folders: tuple[str, ...]) -> str:
    """The same for a text encoder or VAE; the model's own stays a name."""
    return name if name == FROM_MODEL else find_file(name, folders)


def find_file(name: str, folders: tuple[str, ...]) -> str:
    """Absolute path of a file or folder, given by path or by its name in one of `folders` of a models folder."""
    if not name:
        raise Refused(f"the name of a file of {' or '.join(folders)} is empty: give a path or a name")
    if Path(name).exists():
        return os.path.abspath(name)
    roots = models_folders()
    found = list(dict.fromkeys(root / folder / name for root in roots for folder in folders))
    found = [path for path in found if path.exists()]
    if len(found) > 1:
        raise Refused(f"{name} is in more than one folder: give the path, one of {', '.join(map(str, found))}")
    if not found:
        raise Refused(_not_found(name, folders, roots))
    return os.path.abspath(found[0])


def models_folders() -> list[Path]:
    """ComfyUI's models folder: the one of COMFYUI_PATH, the one this pack is installed beside, and ./models."""
    return list(dict.fromkeys(root.resolve() / "models" for root in _roots() if (root / "models").is_dir()))


def tokenizers() -> str:
    """ComfyUI's package `comfy`, which has tokenizers, where one of these folders has it; else empty."""
    packages = (root.resolve() / "comfy" for root in _roots())
    return next((str(package) for package in packages if (package / "text_encoders").is_dir()), "")


def _roots() -> list[Path]:
    named = os.environ.get("COMFYUI_PATH")
    return [*([Path(named)] if named else []), PACK_ROOT.parents[1], Path.cwd()]


def _not_found(name: str, folders: tuple[str, ...], roots: list[Path]) -> str:
    where = f"Looked in {', '.join(map(str, roots))} (folders {', '.join(folders)})"
    nowhere = "There is no models folder to look in: COMFYUI_PATH names none, and there is no ./models"
    known = [TINY_SHAPES, *(RANDOM + family for family in FAMILIES)] if folders == MODEL_FOLDERS else []
    near = difflib.get_close_matches(name, [*known, *_names(roots, folders)], n=NAMED, cutoff=0.5)
    nearest = f"; the nearest names are {', '.join(near)}" if near else ""
    return f"{name}: no such file or folder. {where if roots else nowhere}{nearest}"


def _names(roots: list[Path], folders: tuple[str, ...]) -> Iterator[str]:
    for base in (root / folder for root in roots for folder in folders):
        for place, inside, files in os.walk(base):
            if INDEX in files:
                inside.clear()  # what is below a model is part of it
                yield os.path.relpath(place, base)
            else:
                yield from (os.path.relpath(Path(place) / file, base) for file in files)
