"""A transformer from its files: built without weights, then filled tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .configuration import building, check_values
from .errors import Refused
from .gguf_file import GGUFFile
from .gguf_header import read_gguf
from .inspection import ModelFacts, Source
from .layouts import Rows
from .linear import LocalPart, local_part
from .offload.tensor_file import TensorFile
from .parallel.lengths import length_of
from .parallel.shares import WHOLE, RowsOf
from .positions import AxisPositions, CentredPositions
from .progress import ReportProgress
from .stored import TENSOR_SCALE, WEIGHT_SCALE, Stored
from .timesteps import TimestepWaves

STAGE = "loading"
REPORTS = 50
"""At most so many progress reports (and chances to cancel) in a load."""
NAMED = 5
RANDOM_SEED = 0
STAND_INS = {"timestep waves": TimestepWaves, "centred positions": CentredPositions, "axis positions": AxisPositions}
HOST = torch.device("cpu")


Shapes = Mapping[str, torch.Size]
"""The full shape of each tensor of a model, by the name its class has for it."""


OpenFile = Callable[[Path], Any]
_mapped = partial(safe_open, framework="pt", device="cpu")


@dataclass(frozen=True)
class Streamed:
    """The tensors that come to the device for each run of their block: their names, by block. `from_file`: they are not
    held at all.
    """

    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    from_file: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all blocks."""
        return frozenset(name for names in self.blocks.values() for name in names)


def build_transformer(facts: ModelFacts) -> tuple[nn.Module, Shapes]:
    """The class without weights, and with the tables that it computes for itself; and what it is to be filled with."""
    family = facts.spec
    model_class = getattr(diffusers, family.transformer_class)
    if facts.sources:
        tensors = sum(len(source.names) for source in facts.sources)
        check_values(facts.config, model_class, tensors=tensors, where=_config_of(facts))
    with building(model_class, where=_config_of(facts)):
        model = model_class(**facts.config)
    for table in family.rebuilt:
        arguments = {
            argument: key(model.config) if callable(key) else model.config[key] for argument, key in table.arguments
        }
        parent, _, leaf = table.module.rpartition(".")
        parent = model.get_submodule(parent)
        kind = STAND_INS.get(table.stand_in) or type(getattr(parent, leaf))
        setattr(parent, leaf, kind(**arguments))  # not everything that a class calls so is a module
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return model.eval().requires_grad_(False), _as_stored(shapes, facts.stored)


def _config_of(facts: ModelFacts) -> Path | str:
    """What says the configuration: a file beside the weights, or the weights themselves."""
    if not facts.sources:
        return facts.name
    weights = facts.sources[0].path
    config = weights.parent / "config.json"
    return config if config.is_file() else weights


def _as_stored(shapes: Shapes, stored: Mapping[str, Stored]) -> Shapes:
    """The shapes with the tensors of those Linears that a file stores in another way than as a weight."""
    packed = {name: linear for name, linear in stored.items() if linear.shapes}
    plain = {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] not in packed}
    return plain | {
        f"{name}.{leaf}": torch.Size(shape) for name, linear in packed.items() for leaf, shape in linear.shapes.items()
    }


def fill_transformer(
    model: nn.Module,
    facts: ModelFacts,
    *,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    progress: ReportProgress,
    streamed: Streamed = Streamed(),
) -> None:
    """Give the model its tensors: on `device`, in `dtype` but for what its family keeps in float32.

    Of a layer that is cut over ranks, this rank's part alone is read. On a CPU a tensor that has the right dtype and is
    not cut stays where it is in the file, and ranks share its pages. What is `streamed` goes to the host, or is
    left out where it will be read from the file. Raises `Refused` when the tensors are not those of the model,
    `Cancelled` when the job is stopped.
    """
    if facts.sources:
        _check_names(shapes, facts)
        left_out = streamed.names if streamed.from_file else ()
        tensors = _stored(model, shapes, facts, from_file=streamed.from_file, wanted=lambda name: name not in left_out)
    else:
        tensors = _random_parts(model, shapes)
    stride = -(-len(shapes) // REPORTS)
    for count, (name, tensor) in enumerate(tensors, start=1):
        if tensor is not None:
            place = HOST if name in streamed.names else device
            local_part(model, name).place(tensor.to(device=place, dtype=held_dtype(name, tensor, facts, dtype)))
        if count % stride == 0 or count == len(shapes):
            progress(STAGE, count, len(shapes))
    for module in model.modules():
        for leaf, table in module.named_buffers(recurse=False):
            setattr(module, leaf, table.to(device))
    absent = tuple(f"{block}." for block in streamed.blocks if streamed.from_file)
    for name, tensor in model.named_parameters():
        if tensor.is_meta and not name.startswith(absent):
            raise RuntimeError(f"{name} of {facts.spec.transformer_class} was left without a value")


def held_dtype(name: str, tensor: torch.Tensor, facts: ModelFacts, dtype: torch.dtype) -> torch.dtype | None:
    """What a tensor is converted to; None for codes that another tensor scales, and for scales, which stay as they are."""
    layer, _, leaf = name.rpartition(".")
    coded = layer in facts.stored and leaf != "bias" and tensor.element_size() == 1
    if coded or leaf in (WEIGHT_SCALE, TENSOR_SCALE) or not tensor.is_floating_point():
        return None
    return torch.float32 if facts.spec.stays_float32(name) else dtype


def _check_names(shapes: Shapes, facts: ModelFacts) -> None:
    needed = shapes.keys()
    present = {name for source in facts.sources for name in source.names}
    where = facts.sources[0].path
    for what, names in (("lacks", needed - present), ("has unknown", present - needed)):
        if names:
            first = ", ".join(sorted(names)[:NAMED])
            raise Refused(
                f"{where} {what} {len(names)} tensor{'s'[: len(names) > 1]} of {facts.spec.title}: {first}"
                f"{' ...' if len(names) > NAMED else ''}. Download the file again, or choose a checkpoint of this family"
            )


def _stored(
    model: nn.Module, shapes: Shapes, facts: ModelFacts, *, from_file: bool, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The name of each tensor that is wanted, and this rank's part of it (None for one it does without)."""
    for source in facts.sources:
        open_file = opener(source, mapped=not from_file)
        try:
            with open_file(source.path) as file:
                for name, stored in source.names.items():
                    if not wanted(name):
                        continue
                    check_shape(file.get_slice(stored), name, shapes=shapes, source=source, facts=facts)
                    part, rows = local_part(model, name), source.rows.get(name, ())
                    yield name, read_part(file, source.path, stored, part, rows, open_file)
        except (OSError, SafetensorError) as error:
            raise Refused(f"{source.path} cannot be read: {error}") from error


def opener(source: Source, *, mapped: bool) -> OpenFile:
    """How to open a file of weights: mapped, or to have what is asked for read."""
    if source.is_gguf:
        return partial(GGUFFile, entries=read_gguf(source.path), packed=source.packed, mapped=mapped)
    return _mapped if mapped else TensorFile


def check_shape(stored: Any, name: str, *, shapes: Shapes, source: Source, facts: ModelFacts) -> None:
    """Raise `Refused` where a slice of a file is not of the shape that the model has for it."""
    shape, rows = tuple(stored.get_shape()), source.rows.get(name, ())
    if rows:
        shape = (length_of(rows), *shape[1:])
    if shape != tuple(shapes[name]):
        raise Refused(
            f"{source.path}: {source.names[name]} has shape {shape}, but this {facts.spec.title} "
            f"needs {tuple(shapes[name])}: download the file again"
        )


def read_part(
    file: Any, path: Path, stored: str, part: LocalPart | None, rows: Rows = (), open_file: OpenFile = _mapped
) -> torch.Tensor | None:
    """All of a tensor (or of its `rows`), left in the open file; or a part, copied through an opening of its own: the pages
    that it comes from, and more around them, count as this process's memory for as long as a tensor is left in what they
    were read through.
    """
    if part is None:
        return None
    if part.cut == WHOLE:
        full = file.get_tensor(stored)
        return RowsOf(full, rows)[slice(None),] if rows else full
    with open_file(path) as own:
        piece = own.get_slice(stored)
        return part.cut.take(RowsOf(piece, rows) if rows else piece)


def _random_parts(model: nn.Module, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, tensor in random_tensors(shapes):
        part = local_part(model, name)
        yield name, part and part.cut.take(tensor)


def random_tensors(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """The same random weights in every process, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if drawn.ndim > 1:
            yield name, drawn / drawn[0].numel() ** 0.5
        else:
            yield name, drawn * 0.1 + ("norm" in name and name.endswith("weight"))
