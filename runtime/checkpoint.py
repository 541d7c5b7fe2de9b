"""A transformer from its files: built without weights, then filled tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import diffusers
import torch
from safetensors import SafetensorError
from torch import nn

from .configuration import building, check_values
from .errors import Refused
from .facts import Source
from .inspection import ModelFacts
from .linear import local_part
from .positions import AxisPositions, CentredPositions
from .progress import ReportProgress
from .protocol import LOADING
from .quant.svdquant.packing import padded
from .read_ahead import read_ahead
from .reading import WeightFile, check_shape, stored_bytes
from .stored import FOUR_BIT, JOINED, TENSOR_SCALE, WEIGHT_SCALE, Stored
from .timesteps import TimestepWaves

REPORTS = 50
"""At most so many progress reports (and chances to cancel) in a load."""
READERS = 4
"""Threads that read a file: disks and links to a GPU are faster with several at once."""
NAMED = 5
RANDOM_SEED = 0
STAND_INS = {"timestep waves": TimestepWaves, "centred positions": CentredPositions, "axis positions": AxisPositions}
HOST = torch.device("cpu")


SCALES = (".wscales", ".wcscales", f".{TENSOR_SCALE}", ".smooth", ".smooth_factor")
"""Of the weights and the inputs of 4-bit Linears, as files call them."""
Shapes = Mapping[str, torch.Size]
"""The full shape of each tensor of a model, by the name its class has for it."""
NamedTensor = tuple[str, "torch.Tensor | None"]
"""This rank's part of a tensor; None for one that it does without."""


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
    _check_four_bit(shapes, facts)
    return model.eval().requires_grad_(False), _as_stored(shapes, facts.stored)


def _config_of(facts: ModelFacts) -> Path | str:
    """What says the configuration: a file beside the weights, or the weights themselves."""
    if not facts.sources:
        return facts.name
    weights = facts.sources[0].path
    config = weights.parent / "config.json"
    return config if config.is_file() else weights


def _check_four_bit(shapes: Shapes, facts: ModelFacts) -> None:
    """Raise `Refused` where a file has 4-bit codes for a Linear of another size, but for the padding."""
    for name, stored in facts.stored.items():
        if not stored.shapes or stored.kind not in (*FOUR_BIT, JOINED) or f"{name}.weight" not in shapes:
            continue
        has, needs = facts.shapes[f"{name}.weight"], tuple(shapes[f"{name}.weight"])
        if any(size not in (need, padded(need)) for size, need in zip(has, needs, strict=True)):
            raise Refused(
                f"{facts.sources[0].path} has 4-bit codes of {has} for {name}, but this {facts.spec.title} needs {needs}: "
                f"its configuration is of another model. Download it again"
            )


def _check_finite(tensor: torch.Tensor | None, stored: str, path: Path) -> None:
    """Raise `Refused` where a scale is not a number: a whole picture would be none."""
    if tensor is not None and stored.endswith(SCALES) and not tensor.float().isfinite().all():
        raise Refused(f"{path}: {stored} has numbers that are not finite: the file is damaged, download it again")


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

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        place = HOST if name in streamed.names else device
        return tensor.to(device=place, dtype=held_dtype(name, tensor, facts, dtype))

    left_out = streamed.names if streamed.from_file else frozenset()
    sizes = {name: nbytes for name, nbytes in _stored_bytes(facts, shapes).items() if name not in left_out}
    if facts.sources:
        readers = 0 if streamed.from_file else READERS
        tensors = _stored(
            model, shapes, facts, sizes.keys(), mapped=not streamed.from_file, readers=readers, moved=moved
        )
    else:
        tensors = _random_parts(model, shapes, moved=moved)
    for name, tensor in _told(tensors, sizes, progress):
        if tensor is not None:
            local_part(model, name).place(tensor)
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


def _stored_bytes(facts: ModelFacts, shapes: Shapes) -> dict[str, int]:
    """What each tensor takes in its file, or would take in one."""
    if not facts.sources:
        return {name: 4 * shape.numel() for name, shape in shapes.items()}
    return {name: nbytes for source in facts.sources for name, nbytes in stored_bytes(source).items()}


def _told(tensors: Iterable[NamedTensor], sizes: Mapping[str, int], progress: ReportProgress) -> Iterator[NamedTensor]:
    """The tensors, with progress in bytes: of whole tensors, so that all ranks tell the same."""
    total, done, told = sum(sizes.values()), 0, 0
    for count, (name, tensor) in enumerate(tensors, start=1):
        yield name, tensor
        done += sizes[name]
        if (done - told) * REPORTS >= total or count == len(sizes):
            told = done
            progress(LOADING, done, total)


def _stored(
    model: nn.Module,
    shapes: Shapes,
    facts: ModelFacts,
    wanted: Collection[str],
    *,
    mapped: bool,
    readers: int,
    moved: Callable[[str, torch.Tensor], torch.Tensor],
) -> Iterator[NamedTensor]:
    """This rank's part of each tensor that is wanted, `moved` to where it is used."""
    for source in facts.sources:
        try:
            with WeightFile(source, mapped=mapped) as file:

                def read(name: str, file: WeightFile = file, source: Source = source) -> NamedTensor:
                    check_shape(file.get_slice(name), name, shapes=shapes, source=source, facts=facts)
                    tensor = file.part(name, local_part(model, name))
                    _check_finite(tensor, source.names[name], source.path)
                    return name, tensor if tensor is None else moved(name, tensor)

                yield from read_ahead(read, [name for name in source.names if name in wanted], threads=readers)
        except (OSError, SafetensorError) as error:
            raise Refused(f"{source.path} cannot be read: {error}") from error


def _random_parts(
    model: nn.Module, shapes: Shapes, *, moved: Callable[[str, torch.Tensor], torch.Tensor]
) -> Iterator[NamedTensor]:
    for name, tensor in random_tensors(shapes):
        part = local_part(model, name)
        yield name, part and moved(name, part.cut.take(tensor))


def random_tensors(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """The same random weights in every process, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if drawn.ndim > 1:
            yield name, drawn / drawn[0].numel() ** 0.5
        else:
            yield name, drawn * 0.1 + ("norm" in name and name.endswith("weight"))
