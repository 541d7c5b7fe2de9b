"""How files of a family are written, as far as a table of names does not say it: plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by name."""
TILE = 128
"""Rows of a tile of a 4-bit weight."""


def count_blocks(shapes: Shapes, blocks: str) -> int:
    """How many blocks of a name or pattern there are tensors of."""
    return len({found[1] for name in shapes if (found := re.match(rf"{blocks}\.(\d+)\.", name))})


@dataclass(frozen=True)
class Variant:
    """A relative that is told apart but not run: its name, and a tensor name (after renaming) that gives it away."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Fused:
    """A layer of the original layout whose rows lie otherwise in the class: fused there, or in another order.

    `pattern` is one of its name, without `weight` or `bias`. Its rows are blocks of the relative sizes `blocks`; each of
    `parts` is a layer of the class, by the replacement for the pattern, and the blocks that make it up, in their order.
    `unless` is a tensor, by the same replacement, whose presence says that the layer lies otherwise there.
    """

    pattern: str
    blocks: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    unless: str = ""

    def match(self, layer: str, there: Container[str]) -> re.Match[str] | None:
        """The match of a layer that lies so, in a model of which these tensors are there."""
        found = re.fullmatch(self.pattern, layer)
        return None if found and self.unless and found.expand(self.unless) in there else found


@dataclass(frozen=True)
class Rebuilt:
    """A module whose tables are computed, not stored: built again with these arguments, keys of the configuration or worked
    out from it.

    `stand_in` is a module of ours that takes its place, for the rounding or the positions of ComfyUI.
    """

    module: str
    arguments: tuple[tuple[str, str | Callable[[Mapping[str, Any]], Any]], ...]
    stand_in: Literal["", "timestep waves", "centred positions", "axis positions"] = ""


@dataclass(frozen=True)
class PackedLinear:
    """A 4-bit Linear of Nunchaku's files: its name there, and the Linears of the class of which it has the rows one after
    the other; `{}` stands for the number of the block. `part` is the place of its inputs among the parts of the inputs of
    the one Linear that it belongs to, where it has only those.
    """

    stored: str
    linears: tuple[str, ...]
    part: int | None = None


@dataclass(frozen=True)
class NunchakuFile:
    """How Nunchaku's own files of a family are written (github.com/nunchaku-tech/nunchaku).

    `model_class` is its class there, `modulation` a pattern of the Linears of which the weight alone is in 4 bits, `renames`
    lead from the class's names of plain tensors to the file's, and `comfy_config` works out what its nodes for ComfyUI
    want to know from the configuration. `first_names`: the tensors of a 4-bit Linear have their first names.
    """

    model_class: str
    modulation: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    first_names: bool = False
    comfy_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
