"""The files with the weights of one part of a diffusers folder: one file or shards, listed in an index or not.

They are called `STEM.safetensors`, or `STEM-00001-of-00003.safetensors` and so on with `STEM.safetensors.index.json`; with a
variant of them, `STEM.fp16.safetensors`, `STEM.fp16-00001-of-00003.safetensors` (older: `STEM-00001-of-00003.fp16.safetensors`)
and `STEM.safetensors.index.fp16.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import Refused
from .file_names import PICKLED
from .json_file import read_json
from .safetensors_header import TensorEntry

SUFFIX = ".safetensors"
DIFFUSERS, TRANSFORMERS = "diffusion_pytorch_model", "model"
"""What the two libraries call the weights of their models."""
WEIGHTS = f"{DIFFUSERS}{SUFFIX}"
Headers = Mapping[Path, Mapping[str, TensorEntry]]
"""What each file says of its tensors, by name."""


class WeightName(NamedTuple):
    """What a file's name says: its variant, and which shard of how many it is; no numbers for a file that is all."""

    variant: str
    shard: int = 0
    shards: int = 0


def weight_files(folder: Path, stem: str) -> list[Path]:
    """Those without a variant where there are any, else those of the only variant.

    Raises `Refused` when there are none, when shards are missing, and when there are several variants to choose from.
    """
    names = {file: name for file in sorted(folder.glob(f"*{SUFFIX}")) if (name := _name_of(file, stem))}
    variants = sorted({name.variant for name in names.values()} | _indexed_variants(folder, stem))
    if not variants:
        raise Refused(f"{folder / f'{stem}{SUFFIX}'} is missing{_pickled_too(folder)}: download the {SUFFIX} weights")
    if variants[0] and len(variants) > 1:
        raise Refused(
            f"{folder} has weights of {len(variants)} variants ({', '.join(variants)}) and none without: leave one of them there"
        )
    index = _index_of(folder, stem, variants[0])
    if index.is_file():
        return _listed(index)
    return _complete({file: name for file, name in names.items() if name.variant == variants[0]})


def all_weight_files(folder: Path, stem: str) -> list[Path]:
    """The same; of a folder that has none of that name, every .safetensors file. Raises `Refused` as `weight_files`."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    return files if files and not any(_name_of(file, stem) for file in files) else weight_files(folder, stem)


def variant_of(file: Path, stem: str) -> str | None:
    """The variant that a file of weights is of; None for one of none."""
    name = _name_of(file, stem)
    return name.variant or None if name else None


def merged(headers: Headers) -> dict[str, TensorEntry]:
    """All tensors of some files. Raises `Refused` for one that two of them have."""
    places: dict[str, Path] = {}
    for path, header in headers.items():
        for name in header:
            if places.setdefault(name, path) != path:
                raise Refused(
                    f"{places[name]} and {path} both have {name}: take one of the two files out of the folder"
                )
    return {name: entry for header in headers.values() for name, entry in header.items()}


def twice(path: Path, first: str, second: str, name: str = "") -> Refused:
    """The error for a file that has one tensor under two names."""
    return Refused(
        f"{path} has {first} and {second}, which are one tensor of the model{f' ({name})' if name else ''}: it does not say which "
        f"is meant. Choose a file that has each once"
    )


def _name_of(file: Path, stem: str) -> WeightName | None:
    """None for a file of another stem."""
    pattern = rf"{re.escape(stem)}(?:\.(\w+))?(?:-(\d{{5}})-of-(\d{{5}}))?(?:\.(\w+))?{re.escape(SUFFIX)}"
    found = re.fullmatch(pattern, file.name)
    return found and WeightName(found[1] or found[4] or "", int(found[2] or 0), int(found[3] or 0))


def _index_of(folder: Path, stem: str, variant: str) -> Path:
    return folder / f"{stem}{SUFFIX}.index{variant and '.'}{variant}.json"


def _indexed_variants(folder: Path, stem: str) -> set[str]:
    pattern = rf"{re.escape(stem + SUFFIX)}\.index(?:\.(\w+))?\.json"
    return {found[1] or "" for file in folder.iterdir() if (found := re.fullmatch(pattern, file.name))}


def _listed(index: Path) -> list[Path]:
    """The files that an index names."""
    listed = read_json(index).get("weight_map")
    names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
    files = [index.parent / name for name in names if name == Path(name).name]
    if not files:
        raise Refused(f"{index} lists no files: download it again")
    _check_there(files)
    return files


def _complete(names: Mapping[Path, WeightName]) -> list[Path]:
    """The one file, or all of its shards."""
    whole = [file for file, name in names.items() if not name.shards]
    if whole:
        return whole[:1]
    counts = {name.shards for name in names.values()}
    if len(counts) > 1:
        first, last = min(names, key=names.get), max(names, key=names.get)
        raise Refused(f"{first} and {last.name} are shards of two sets: take those of one out of the folder")
    first = next(iter(names))
    start = f"-{names[first].shard:05d}-of-"
    expected = [first.with_name(first.name.replace(start, f"-{n:05d}-of-")) for n in range(1, counts.pop() + 1)]
    _check_there(expected)
    return expected


def _check_there(files: list[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise Refused(f"{file} is missing{_pickled_too(file.parent)}: download the {SUFFIX} weights")


def _pickled_too(folder: Path) -> str:
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED) if folder.is_dir() else []
    return f" ({pickled[0]} is a pickle, which can run code and is never opened)" if pickled else ""
