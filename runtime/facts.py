"""What is known of a model before a weight is read: plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .families import FAMILIES
from .families.spec import FamilySpec
from .file_names import is_gguf
from .layouts import Rows
from .stored import Stored


@dataclass(frozen=True)
class Source:
    """One file of weights: `names` leads from the model's name of a tensor to the file's, and `rows` says which rows of that
    it is, where it is not all of them. `packed` are those of the file's names that are used in the blocks they are stored in.
    """

    path: Path
    names: Mapping[str, str] = field(repr=False)
    rows: Mapping[str, Rows] = field(default_factory=dict, repr=False)
    packed: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def is_gguf(self) -> bool:
        """Whether it is a .gguf file, and no .safetensors file."""
        return is_gguf(self.path)

    def widens(self, name: str) -> bool:
        """Whether reading a tensor of the model makes other numbers of it than the file has."""
        return self.is_gguf and self.names[name] not in self.packed


@dataclass(frozen=True)
class ModelFacts:
    """What a model is and where its parts are. `sources` is empty for a model with random weights; `shapes` are those of
    the transformer's tensors by the names that its class has for them, empty where they are not known, and `formats` what
    the headers call their number formats. `stored` names the Linears that are not held as a plain weight.

    `transformer_2` is a second expert beside this one in a folder. Of a pair that runs as one model, this is the expert of
    high noise and `low_noise` the other, which takes over below the sigma `boundary`.
    """

    name: str
    family: str
    heads: int
    head_dim: int
    layers: int
    config: Mapping[str, Any] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    sources: tuple[Source, ...] = field(default=(), repr=False)
    stored: Mapping[str, Stored] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    text_encoders: tuple[Path, ...] = ()
    vae: Path | None = None
    transformer_2: Path | None = None
    formats: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    low_noise: ModelFacts | None = field(default=None, repr=False)
    boundary: float = 0.0

    @property
    def spec(self) -> FamilySpec:
        """The family's."""
        return FAMILIES[self.family]

    @property
    def experts(self) -> tuple[ModelFacts, ...]:
        """The transformers that take turns: this one, and the expert of low noise where there is one."""
        return (self,) if self.low_noise is None else (self, self.low_noise)

    @cached_property
    def hidden(self) -> int:
        """Features inside the MLP: the widest output that is left cut; 0 where the shapes are not known."""
        columns = [shard.pattern for shard in self.spec.tensor.linears if shard.mode == "column"]
        linears = ((name.removesuffix(".weight"), shape) for name, shape in self.shapes.items() if len(shape) == 2)
        return max(
            (shape[0] for name, shape in linears if any(re.fullmatch(each, name) for each in columns)), default=0
        )


def facts_of(family: FamilySpec, config: Mapping[str, Any], *, name: str = "", **parts: Any) -> ModelFacts:
    """The facts of a model of this family and configuration."""
    return ModelFacts(
        name=name,
        family=family.name,
        heads=config[family.heads],
        head_dim=family.head_dim_of(config),
        layers=config[family.layers],
        config=MappingProxyType(dict(config)),
        **parts,
    )
