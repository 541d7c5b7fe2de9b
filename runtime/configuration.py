"""The config.json of a model's part against the class that is built from it: damage is told by the file's name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from .errors import Refused
from .json_file import read_json
from .safetensors_header import TensorEntry, read_header
from .weight_files import Headers, merged, variant_of, weight_files
from .weight_formats import check_formats

Model = TypeVar("Model", bound=nn.Module)

LARGEST = 1 << 20
"""No size or count in a configuration is larger; a table of so many entries still fits in memory."""
NAMED = 5
NONSENSE = (
    ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError, StrictDataclassError,
)  # fmt: skip
"""What the classes of diffusers and transformers raise on values that they do not expect."""
KINDS: dict[type, Callable[[Any], bool]] = {
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int and 0 <= value <= LARGEST,
    float: lambda value: type(value) in (int, float) and math.isfinite(value),
    str: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
}


def check_values(config: Mapping[str, Any], model_class: type, *, tensors: int, where: Path | str) -> None:
    """Raise `Refused` for a value of a kind that the class does not take, or more layers than there are `tensors`."""
    parameters = inspect.signature(model_class.__init__).parameters
    for name, value in config.items():
        too_deep = "layers" in name and type(value) is int and value > tensors
        if too_deep or (name in parameters and not _is_taken(value, parameters[name])):
            raise Refused(f"{where} is damaged: {name} is {str(value)[:60]!r}. Download it again")


def _is_taken(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a single value is of a kind that a parameter is annotated with; what is in a list is left to the class."""
    annotation = parameter.annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not KINDS.keys() >= set(kinds):
        return True
    empty = type(value) is int and value == 0 and parameter.default != 0
    return not empty and any(KINDS[kind](value) for kind in kinds)


@contextmanager
def building(model_class: type, *, where: Path | str) -> Iterator[None]:
    """Build the class without weights in here. Raises `Refused` when the configuration makes no sense to it."""
    try:
        with torch.device("meta"):
            yield
    except NONSENSE as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise Refused(
            f"{where} is damaged or of another model: {model_class.__name__} refuses it ({reason}). Download it again"
        ) from error


def empty_model(
    model_class: type[Model], folder: Path, *, stem: str, build: Callable[[dict[str, Any]], Model]
) -> tuple[Model, Headers]:
    """The model of a folder without its weights, and the headers of the files that hold them (see `weight_files`).

    `build` makes it from a configuration. Raises `Refused` when file and configuration are not those of the class.
    """
    where = folder / "config.json"
    config = read_json(where)
    headers = {file: read_header(file) for file in weight_files(folder, stem)}
    check_values(config, model_class, tensors=sum(map(len, headers.values())), where=where)
    with building(model_class, where=where):
        model = build(config)
        tensors = model.state_dict()
    merged(headers)
    for file, header in headers.items():
        _check_shapes(header, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, file=file)
        floats = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
        check_formats(file, {name: entry.dtype for name, entry in header.items() if name in floats})
    return model, headers


def load_folder(
    model_class: type[Model], folder: Path, *, stem: str, build: Callable[[dict[str, Any]], Model], **options: Any
) -> Model:
    """The class with the weights of a folder, as its `from_pretrained` gives it with these `options`.

    `build` makes it from a configuration alone. Raises `Refused` when file and configuration are not those of the class.
    """
    _, headers = empty_model(model_class, folder, stem=stem, build=build)
    options |= {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        model, report = model_class.from_pretrained(folder, variant=variant_of(next(iter(headers)), stem), **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise Refused(
            f"{folder} holds no {model_class.__name__} that can be loaded ({error}): download it again"
        ) from error
    check_names(folder, lacking=report["missing_keys"], unknown=report["unexpected_keys"])
    return model


def check_names(folder: Path, *, lacking: Collection[str], unknown: Collection[str]) -> None:
    """Raise `Refused` where there are tensors that a folder lacks, or that its model does not know."""
    for problem, names in (("lacks", lacking), ("has unknown", unknown)):
        if names:
            raise Refused(f"{folder} {problem} {', '.join(sorted(names)[:NAMED])}: download it again")


def _check_shapes(header: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]], *, file: Path) -> None:
    for name, entry in header.items():
        if name in shapes and shapes[name] != entry.shape:
            raise Refused(
                f"{file}: {name} has shape {entry.shape}, but by the config.json beside it {shapes[name]}: "
                f"download both again"
            )
