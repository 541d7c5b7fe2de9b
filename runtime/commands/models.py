"""Models by name, as ComfyUI keeps them: files and folders under its models folder."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import Refused
from ..families import FAMILIES
from ..inspection import RANDOM
from ..launch import PACK_ROOT
from ..settings import FROM_MODEL, TINY_SHAPES

MODEL_FOLDERS = ("diffusion_models", "checkpoints", "diffusers")
TEXT_ENCODER_FOLDERS, VAE_FOLDERS = ("text_encoders", "diffusers"), ("vae", "diffusers")
LORA_FOLDERS = ("loras",)
INDEX = "model_index.json"
NAMED = 3


def find_model(name: str) -> str:
    """What a `--model` means: `tiny-shapes`, `random:FAMILY`, a path, or a name under a models folder. Raises `Refused`."""
    if name == TINY_SHAPES or name.startswith(RANDOM):
        return name
    return find_file(name, MODEL_FOLDERS)


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
    named = os.environ.get("COMFYUI_PATH")
    roots = [*([Path(named)] if named else []), PACK_ROOT.parents[1], Path.cwd()]
    return list(dict.fromkeys(root.resolve() / "models" for root in roots if (root / "models").is_dir()))


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
