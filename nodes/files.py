"""Model files by the names that the combos show, and back to paths.

A name is the file's own, as ComfyUI's loaders show it. Where two folders hold the same name, each gets its folder in
brackets, and the bare name is refused: what a workflow means must not depend on what else is installed.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ..runtime.errors import shown
from . import host
from .parts import FROM_MODEL, TINY_SHAPES

SAFE_SUFFIXES = (".safetensors", ".sft")
GGUF_SUFFIX, GGUF_FOLDERS = ".gguf", ("diffusion_models", "checkpoints")
"""ComfyUI's own lists leave such files out."""
MODEL_FOLDERS = ("diffusion_models", "checkpoints", "diffusers")
BUILT_IN = "built in"
NONE = "none"


def model_choices() -> list[str]:
    """What the model combo offers: the built-in model first, then files and folders by name."""
    found = _found(MODEL_FOLDERS, built_in=TINY_SHAPES)
    return [_label(name, folder, found) for name, folders in found.items() for folder in folders]


def component_choices(folder: str, part: str) -> list[str]:
    """What a combo of text encoders or VAEs offers: the model's own, files of the folder, parts of Diffusers models."""
    return [FROM_MODEL, *_names(folder), *_parts(part)]


def find_model(choice: str, what: str = "model") -> str:
    """Absolute path of a model by its choice in the widget `what` (the built-in model stays a name).

    Raises `ValueError` with the way out.
    """
    _check_name(what, choice)
    found = _found(MODEL_FOLDERS, built_in=TINY_SHAPES)
    name, folder = _parted(choice)
    folders = found.get(name, [])
    if folder not in folders and len(folders) > 1:
        choices = ", ".join(_label(name, each, found) for each in folders)
        raise ValueError(f"{what} {choice!r} is in more than one folder: choose one of {choices}")
    if not folders or (folder and folder not in folders):
        raise ValueError(_not_found(what, choice, list(found), MODEL_FOLDERS))
    return _path(folder or folders[0], name)


def find_component(what: str, choice: str, folder: str, part: str) -> str:
    """Absolute path of a text encoder or VAE by its choice; the model's own stays a name."""
    _check_name(what, choice)
    if choice == FROM_MODEL:
        return choice
    if choice in _names(folder):
        return _path(folder, choice)
    if choice in _parts(part):
        return _path("diffusers", choice)
    raise ValueError(_not_found(what, choice, component_choices(folder, part), (folder, "diffusers")))


def lora_choices() -> list[str]:
    """What the combo of LoRAs offers."""
    return _names("loras")


def find_lora(choice: str) -> str:
    """Absolute path of a LoRA by its choice. Raises `ValueError` with the way out."""
    _check_name("lora_name", choice)
    if choice not in lora_choices():
        raise ValueError(_not_found("lora_name", choice, lora_choices(), ("loras",)))
    return _path("loras", choice)


def second_model_choices() -> list[str]:
    """What the combo of a second expert offers: none first."""
    return [NONE, *(choice for choice in model_choices() if choice != TINY_SHAPES)]


def find_all(
    model: str,
    *,
    text_encoder: str,
    text_encoder_2: str,
    vae: str,
    model_low_noise: str = NONE,
    text_encoder_3: str = FROM_MODEL,
) -> dict[str, str]:
    """Path of the model and of each component, by the name of its widget. Raises `ValueError` with the way out."""
    encoders = {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3}
    return {
        "model": find_model(model),
        "model_low_noise": "" if model_low_noise == NONE else find_model(model_low_noise, "model_low_noise"),
        **{name: find_component(name, choice, "text_encoders", name) for name, choice in encoders.items()},
        "vae": find_component("vae", vae, "vae", "vae"),
    }


def stamp(paths: dict[str, str]) -> str:
    """Changes when a file, or a file of a folder, changes: path, number, size and time of change of each."""
    files = [file for path in paths.values() if os.path.isabs(path) for file in _files_of(Path(path))]
    stats = sorted(
        (os.fsencode(file), status.st_ino, status.st_size, status.st_mtime_ns)
        for file in files
        for status in [file.stat()]
    )
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _check_name(what: str, choice: object) -> None:
    if not isinstance(choice, str):
        raise ValueError(f"{what} {shown(choice)} is not a name: choose one of the list")


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [file for place, _, names in _walk(path) for name in names if (file := Path(place, name)).is_file()]


def _found(folders: tuple[str, ...], *, built_in: str) -> dict[str, list[str]]:
    """The folders that hold each name, in the order of the folders."""
    found = {built_in: [BUILT_IN]}
    for folder in folders:
        for name in _names(folder):
            found.setdefault(name, []).append(folder)
    return found


def _names(folder: str) -> list[str]:
    if folder == "diffusers":
        return sorted(_diffusers_folders())
    listed = [name for name in host.model_files(folder) if name.lower().endswith(SAFE_SUFFIXES)]
    return sorted({*listed, *_gguf_files(folder)}) if folder in GGUF_FOLDERS else listed


def _gguf_files(folder: str) -> Iterator[str]:
    for root in host.model_roots(folder):
        for place, _, files in _walk(root):
            names = (name for name in files if name.lower().endswith(GGUF_SUFFIX))
            yield from (os.path.relpath(Path(place, name), root) for name in names)


def _diffusers_folders() -> Iterator[str]:
    for root in host.model_roots("diffusers"):
        for place, inside, files in _walk(root):
            if "model_index.json" in files and Path(place) != root:
                yield os.path.relpath(place, root)
                inside.clear()  # what is below a model is part of it
            inside[:] = [name for name in inside if not name.startswith(".")]


def _walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, through links as well, but each folder once: by its own name, where that lies below `top` too.

    Links may lead round in circles, or many to one place.
    """
    waiting, seen = deque([os.fspath(top)]), set()
    while waiting:
        for place, inside, files in os.walk(waiting.popleft()):
            status = os.stat(place)
            if (status.st_dev, status.st_ino) in seen:
                inside.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            yield place, inside, files
            folders = [os.path.join(place, name) for name in inside]
            waiting.extend(folder for folder in folders if os.path.islink(folder))


def _parts(part: str) -> list[str]:
    roots = host.model_roots("diffusers")
    return [f"{name}/{part}" for name in _names("diffusers") if any((root / name / part).is_dir() for root in roots)]


def _path(folder: str, name: str) -> str:
    if folder == BUILT_IN:
        return name
    if folder == "diffusers":
        return next(os.path.abspath(root / name) for root in host.model_roots(folder) if (root / name).is_dir())
    found = host.model_path(folder, name)
    if found is None:
        raise ValueError(f"{name!r} of the folder {folder!r} is gone: press R to refresh the lists, and choose again")
    return os.path.abspath(found)


def _label(name: str, folder: str, found: dict[str, list[str]]) -> str:
    return name if len(found[name]) == 1 or folder == BUILT_IN else f"{name} [{folder}]"


def _parted(choice: str) -> tuple[str, str]:
    """Name and folder of a choice; the folder is empty for a bare name, and the built-in model is always meant by its own."""
    name, bracket, rest = choice.rpartition(" [")
    if bracket and rest.endswith("]") and rest[:-1] in MODEL_FOLDERS:
        return name, rest[:-1]
    return choice, BUILT_IN if choice == TINY_SHAPES else ""


def _not_found(what: str, choice: str, names: list[str], folders: tuple[str, ...]) -> str:
    if Path(choice).suffix.lower() in (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pt2"):
        return f"{what} {choice!r}: convert it to .safetensors: such files can hold programs, and are not read"
    near = difflib.get_close_matches(choice, names, n=3, cutoff=0.5)
    nearest = f"; the nearest names are {', '.join(near)}" if near else ""
    return f"{what} {choice!r} is not in models/{' or models/'.join(folders)}, and nothing is downloaded{nearest}"
