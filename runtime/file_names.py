"""Which files of weights are opened, by their names alone."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import Refused

SAFETENSORS, GGUF_SUFFIX = (".safetensors", ".sft"), ".gguf"
READ = (*SAFETENSORS, GGUF_SUFFIX)
PICKLED = (".ckpt", ".pt", ".pth", ".bin")
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(\.\w+)?$")
"""What diffusers and transformers put behind the name of a file that holds a part of a model, and of a variant of it."""


def check_file_name(path: Path, suffixes: tuple[str, ...] = READ) -> None:
    """Raise `Refused` for a pickle, for a part of a model, and for a file without one of the `suffixes`."""
    suffix, shard = path.suffix.lower(), SHARD.search(path.stem)
    if suffix in PICKLED:
        raise Refused(
            f"{path} is a pickle, which can run code and is never opened: use a .safetensors file of the model"
        )
    if suffix not in suffixes:
        kinds = " or ".join(each for each in suffixes if each != SAFETENSORS[1])
        raise Refused(f"{path} is not a {kinds} file: choose one, or a diffusers folder")
    if shard and int(shard[2]) > 1:
        raise Refused(
            f"{path} is part {int(shard[1])} of {int(shard[2])} of a model: choose the folder of all its parts (of a model, the "
            f"diffusers folder with model_index.json), or a file that is whole"
        )


def is_gguf(path: Path) -> bool:
    """Whether it is a .gguf file, and no .safetensors file."""
    return path.suffix.lower() == GGUF_SUFFIX
