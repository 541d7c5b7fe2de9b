"""A transformer from its files: built without weights, then filled tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from .configuration import building, check_values
from .errors import Refused
from .facts import Source
from .holding import HOST, Holding, Streamed, unit_of
from .inspection import ModelFacts
from .linear import local_part
from .offload.host_copy import Share, share_parameters
from .positions import AxisPositions, CentredPositions
from .progress import ReportProgress, tell_failure
from .protocol import LOADING
from .quant.core import Core
from .quant.svdquant.packing import padded
from .read_ahead import read_ahead
from .reading import WeightFile, check_shape, stored_bytes
from .release import release_memory
from .stored import FOUR_BIT, JOINED, TENSOR_SCALE, Stored
from .timesteps import TimestepWaves

REPORTS = 50
"""At most so many progress reports (and chances to cancel) in a load."""
READERS = 4
"""Threads that read a file: disks and links to a GPU are faster with several at once."""
NAMED = 5
RANDOM_SEED = 0
STAND_INS = {"timestep waves": TimestepWaves, "centred positions": CentredPositions, "axis positions": AxisPositions}


SCALES = (".wscales", ".wcscales", f".{TENSOR_SCALE}", ".smooth", ".smooth_factor")
"""Of the weights and the inputs of 4-bit Linears, as files call them."""
Shapes = Mapping[str, torch.Size]
"""The full shape of each tensor of a model, by the name its class has for it."""


class Found(NamedTuple):
    """This rank's part of a tensor; None of one that it does without, or that another rank makes. `stays`: it is used where
    the file has it.
    """

    name: str
    part: torch.Tensor | None
    stays: bool = False


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
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Give the model its tensors: on `device`, in `dtype` but for what its family keeps in float32. Whether some stay in
    the files, which are read from for as long as the model is used.

    Of a layer that is cut over ranks, this rank's part alone is read. On a CPU a tensor that has the right dtype and is
    not cut stays where it is in the file, and ranks share its pages; what else is in host memory lies there once for all
    ranks of `group`, who hold the same. What is `streamed` goes to the host, or is left out where it will be read from the
    file. Raises `Refused` when the tensors are not those of the model, `Cancelled` when the job is stopped.
    """
    share = Share.of([unit_of(name, facts) for name in shapes], group)
    tables = frozenset(name for name, _ in model.named_buffers())
    holding = Holding(facts, dtype, device, streamed, share, tables)
    if facts.sources:
        _check_names(shapes, facts)
    left_out = streamed.names if streamed.from_file else frozenset()
    sizes = {name: nbytes for name, nbytes in _stored_bytes(facts, shapes).items() if name not in left_out}
    tensors = _stored(model, shapes, holding, sizes.keys()) if facts.sources else _random_parts(model, shapes, holding)
    mapped = []
    for name, tensor, stays in _told(tensors, sizes, progress):
        if tensor is not None:
            part = local_part(model, name)
            part.place(tensor)
            mapped += [getattr(part.module, part.leaf)] if stays else []
    if group is not None or device.type == "cuda":
        _share_host_copy(model, mapped, group)
    release_memory()  # what the weights were made from
    for module in model.modules():
        for leaf, table in module.named_buffers(recurse=False):
            setattr(module, leaf, table.to(device))
    absent = tuple(f"{block}." for block in streamed.blocks if streamed.from_file)
    for name, tensor in model.named_parameters():
        if tensor.is_meta and not name.startswith(absent):
            raise RuntimeError(f"{name} of {facts.spec.transformer_class} was left without a value")
    return bool(mapped or absent)


def _share_host_copy(model: nn.Module, mapped: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Put what this rank has made in host memory where the others can map it; first what is streamed, in its order."""
    left = {id(parameter) for parameter in mapped}
    made = [name for name, each in model.named_parameters() if each.device == HOST and id(each) not in left]
    in_cores = {name for name in made if isinstance(model.get_submodule(name.rpartition(".")[0]), Core)}
    share_parameters(model, sorted(made, key=lambda name: name not in in_cores), group=group)


def _check_names(shapes: Shapes, facts: ModelFacts) -> None:
    needed = shapes.keys()
    present = {name for source in facts.sources for name in source.names}
    where = facts.sources[0].path
    for what, names in (("lacks", needed - present), ("has unknown", present - needed)):
        if names:
            first = ", ".join(sorted(names)[:NAMED])
            raise Refused(
                f"{where} {what} {len(names)} tensor{'s'[: len(names) > 1]} of {facts.spec.title}: {first}"
                f"{' ...' if len(names) > NAMED else ''}: it is damaged, or a relative that is not available. Download the file "
                f"again, or choose a checkpoint of this family"
            )


def _stored_bytes(facts: ModelFacts, shapes: Shapes) -> dict[str, int]:
    """What each tensor takes in its file, or would take in one."""
    if not facts.sources:
        return {name: 4 * shape.numel() for name, shape in shapes.items()}
    return {name: nbytes for source in facts.sources for name, nbytes in stored_bytes(source).items()}


def _told(tensors: Iterable[Found], sizes: Mapping[str, int], progress: ReportProgress) -> Iterator[Found]:
    """The tensors, with progress in bytes: of whole tensors, so that all ranks tell the same. What one rank cannot read is
    told of there.
    """
    total, done, told = sum(sizes.values()), 0, 0
    for count, found in enumerate(_until_refused(tensors), start=1):
        if isinstance(found, Refused):
            tell_failure(progress, LOADING, done, total, failure=found)
        yield found
        done += sizes[found.name]
        if (done - told) * REPORTS >= total or count == len(sizes):
            told = done
            progress(LOADING, done, total)


def _until_refused(tensors: Iterable[Found]) -> Iterator[Found | Refused]:
    """The tensors, and at the end what stands in the way of more of them."""
    try:
        yield from tensors
    except Refused as error:
        yield error


def _stored(model: nn.Module, shapes: Shapes, holding: Holding, wanted: Collection[str]) -> Iterator[Found]:
    """This rank's part of each tensor that is wanted, moved to where it is used."""
    facts = holding.facts
    for source in facts.sources:
        try:
            with WeightFile(source, mapped=not holding.streamed.from_file) as file:

                def read(name: str, file: WeightFile = file, source: Source = source) -> Found:
                    piece, part = file.get_slice(name), local_part(model, name)
                    check_shape(piece, name, shapes=shapes, source=source, facts=facts)
                    stays = part is not None and holding.stays_mapped(name, piece, part, source)
                    tensor = file.part(name, part, stays=stays) if stays or holding.is_made_here(name) else None
                    _check_finite(tensor, source.names[name], source.path)
                    return Found(name, holding.moved(name, tensor), stays)

                names = [name for name in source.names if name in wanted]
                yield from read_ahead(read, names, threads=READERS if holding.reads_in_threads else 0)
        except (OSError, SafetensorError) as error:
            raise Refused(f"{source.path} cannot be read: {error}") from error


def _random_parts(model: nn.Module, shapes: Shapes, holding: Holding) -> Iterator[Found]:
    for name, tensor in random_tensors(shapes):
        part = local_part(model, name) if holding.is_made_here(name) else None
        yield Found(name, holding.moved(name, part and part.cut.take(tensor)))


def random_tensors(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """The same random weights in every process, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if drawn.ndim > 1:
            yield name, drawn / drawn[0].numel() ** 0.5
        else:
            yield name, drawn * 0.1 + ("norm" in name and name.endswith("weight"))
