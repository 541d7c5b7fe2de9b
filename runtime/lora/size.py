"""What LoRAs will take of memory, told by the headers of their files. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from ..facts import ModelFacts
from ..footprint import DTYPE_BYTES, FLOAT32_BYTES, local_shape
from ..safetensors_header import TensorEntry, read_header
from ..settings import BOTH_EXPERTS, EXPERTS, LoraSettings
from .formats import REFUSED_ROLES, group_keys, unread_roles
from .names import WEIGHT, LayerNames

Entries = Mapping[str, TensorEntry]
"""The tensors that a file has for a layer, by role."""
OF_ROWS = ("up", "magnitude", "magnitude_of_sum")
"""The roles of what is cut along with the rows of a pair's product."""


class Form(NamedTuple):
    """What a layer of a file is: a matrix of `out` rows and `into` columns; the `rank` of the pair that it becomes, 0 where it
    becomes none; and how many `matrices` of that size are there while it is made.
    """

    out: int
    into: int
    rank: int = 0
    matrices: int = 1


class Added(NamedTuple):
    """What a file does to one weight: a pair of a `rank`, or a change of so many bytes in the file, which is a part of a matrix
    of `whole` numbers; `made` of them are there while it is worked out. `is_folded`: into its weight, where that can be written
    anew.
    """

    name: str
    rank: int
    nbytes: int
    whole: int
    made: int
    is_folded: bool


WorkedOut = Mapping[str, list[Added]]
"""What is worked out in each call, by the name of its Linear."""


@dataclass(frozen=True)
class LoraBytes:
    """What LoRAs take: `beside` the weights of a rank, on its device; of its own host memory for their `files`; and for weights
    that are `folded`, which are there as they were too, once for the ranks that hold the same.
    """

    beside: int = 0
    files: int = 0
    folded: int = 0

    def __add__(self, other: LoraBytes) -> LoraBytes:
        return LoraBytes(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def added_by(loras: Iterable[LoraSettings], facts: ModelFacts) -> tuple[tuple[Added, ...], ...]:
    """What they do to the weights of each expert. Nothing of what is off or cannot be read, which whoever puts it on will tell."""
    on = [lora for lora in loras if lora.strength]
    return tuple(
        tuple(added for lora in on if lora.expert in (BOTH_EXPERTS, expert) for added in _added(lora, each))
        for expert, each in zip(EXPERTS, facts.experts, strict=False)
    )


def lora_bytes(
    facts: ModelFacts, added: Sequence[Added], streamed: Collection[str], *, dtype: str, tensor: int, on_host: bool
) -> LoraBytes:
    """What they take of the rank that holds most of an expert, whose blocks `streamed` come in for each run."""
    rewritten = {each.name for each in added if each.is_folded and _folds(facts, each.name, streamed)}
    folded = sum(
        round(math.prod(_local(facts, name, tensor))) * _number_bytes(facts, name, dtype) for name in rewritten
    )
    beside = files = 0
    for each in added:
        pair = each.rank * round(sum(_local(facts, each.name, tensor))) * _number_bytes(facts, each.name, dtype)
        is_gone = each.is_folded and each.name in rewritten
        is_moved = not on_host and facts.spec.block_of(each.name) not in streamed
        files += pair or each.nbytes
        beside += (pair or each.nbytes * is_moved) * (not is_gone)
    return LoraBytes(beside, files, folded)


def worked_out(facts: ModelFacts, added: Iterable[Added], streamed: Collection[str]) -> WorkedOut:
    """The changes of weights that cannot be written anew."""
    found: dict[str, list[Added]] = {}
    for each in added:
        if not each.rank and not _folds(facts, each.name, streamed):
            found.setdefault(each.name.removesuffix(WEIGHT), []).append(each)
    return found


def _local(facts: ModelFacts, name: str, tensor: int) -> tuple[float, float]:
    """The shape of a weight on the rank that has most of it, what is in the kernel of a convolution taken together."""
    out, *into = facts.shapes[name]
    return local_shape(facts, name.removesuffix(WEIGHT), tensor) if len(into) == 1 else (out, math.prod(into))


def _number_bytes(facts: ModelFacts, name: str, dtype: str) -> int:
    return FLOAT32_BYTES if facts.spec.stays_float32(name) else DTYPE_BYTES[dtype]


def _folds(facts: ModelFacts, name: str, streamed: Collection[str]) -> bool:
    """Whether a weight is there all the time as numbers: neither packed nor streamed."""
    is_streamed = len(facts.shapes[name]) == 2 and facts.spec.block_of(name) in streamed
    return name.removesuffix(WEIGHT) not in facts.stored and not is_streamed


def _added(lora: LoraSettings, facts: ModelFacts) -> Iterator[Added]:
    """What a file does to the weights of an expert."""
    entries: Mapping[str, TensorEntry] = {}
    with suppress(OSError, ValueError):
        entries = read_header(Path(lora.path))
    names = LayerNames(facts.spec, facts.shapes)
    for layer, roles in group_keys(entries)[0].items():
        read = {role: entries[key] for role, key in roles.items() if role not in unread_roles(roles)}
        form = None if REFUSED_ROLES.keys() & read.keys() or not names.owns(layer) else _form(read)
        for target in names.find(layer) if form else ():
            rank = form.rank if len(facts.shapes[target.name]) == 2 else 0
            whole = math.prod(facts.shapes[target.name]) if "up" in read else form.out * form.into
            part = whole / (form.out * form.into)
            nbytes = sum(
                round((entry.end - entry.start) * (part if role in OF_ROWS else 1)) for role, entry in read.items()
            )
            yield Added(target.name, rank, nbytes, whole, form.matrices * whole, is_folded=lora.fuse or not rank)


def _form(entries: Entries) -> Form | None:
    """What the tensors of a layer are together, as `weight_change` makes it; None where they change no weight or lack a part."""
    shapes = {role: (entry.shape[0], math.prod(entry.shape[1:])) for role, entry in entries.items() if entry.shape}
    with suppress(KeyError):
        if full := next((shapes[role] for role in ("value", "difference") if role in shapes), None):
            return Form(*full)
        form = _product(shapes)
        return form and form._replace(rank=0 if {"magnitude", "magnitude_of_sum"} & shapes.keys() else form.rank)
    return None


def _product(shapes: Mapping[str, tuple[int, int]]) -> Form | None:
    """Raises `KeyError` for a part that is missing."""
    if {"down", "up"} & shapes.keys():
        return Form(shapes["up"][0], shapes["down"][1], rank=shapes["down"][0])
    if any(role.startswith("hada_") for role in shapes):
        rank = shapes["hada_w1_b"][0] * shapes["hada_w2_b"][0]
        return _where_smaller(Form(shapes["hada_w1_a"][0], shapes["hada_w1_b"][1], rank, matrices=2))
    if any(role.startswith("lokr_") for role in shapes):
        first, second = (_factor(shapes, f"lokr_w{number}") for number in (1, 2))
        return _where_smaller(Form(first.out * second.out, first.into * second.into, first.rank * second.rank))
    return None


def _factor(shapes: Mapping[str, tuple[int, int]], role: str) -> Form:
    """A factor of a Kronecker product, which has as many ranks as its smaller side where it is given as it is."""
    if role in shapes:
        return Form(*shapes[role], rank=min(shapes[role]))
    return Form(shapes[f"{role}_a"][0], shapes[f"{role}_b"][1], rank=shapes[f"{role}_b"][0])


def _where_smaller(form: Form) -> Form:
    """As a pair where that has fewer numbers, as in `Change.pair`."""
    return form if form.rank * (form.out + form.into) < form.out * form.into else form._replace(rank=0)
