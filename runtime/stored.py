"""How the weight of a Linear lies in a file: plain data, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

PLAIN = "none"
SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4 = "svdquant-int4", "svdquant-int4-unsigned", "svdquant-nvfp4"
AWQ_INT4, JOINED = "awq-int4", "joined"
FOUR_BIT = (SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4, AWQ_INT4)
FP8, FP8_E5M2, FP8_WIDENED = "fp8", "fp8-e5m2", "fp8-widened"
FP8_FORMATS: Mapping[str, str] = {"F8_E4M3": FP8, "F8_E5M2": FP8_E5M2}
"""The kind of core by the format that a file's header names."""
WEIGHT_SCALE = "weight_scale"
"""What an 8-bit weight is multiplied with: one float32 number."""
TENSOR_SCALE = "wtscale"
"""What a weight in 4-bit floats is multiplied with: one float32 number."""
GROUPS: Mapping[str, int] = {SVDQUANT_INT4: 64, SVDQUANT_INT4_UNSIGNED: 64, SVDQUANT_NVFP4: 16, JOINED: 64}
"""How many input features are rounded together, by kind: no cut may go through them."""


class Block(NamedTuple):
    """So many numbers of a row that share their scales, and the bytes they take."""

    elements: int
    nbytes: int


BLOCKS: Mapping[str, Block] = {
    "Q8_0": Block(32, 34), "Q5_1": Block(32, 24), "Q5_0": Block(32, 22), "Q4_1": Block(32, 20), "Q4_0": Block(32, 18),
    "Q6_K": Block(256, 210), "Q5_K": Block(256, 176), "Q4_K": Block(256, 144), "Q3_K": Block(256, 110),
    "Q2_K": Block(256, 84), "IQ4_XS": Block(256, 136), "IQ4_NL": Block(32, 18), "IQ3_S": Block(256, 110),
    "IQ3_XXS": Block(256, 98), "IQ2_S": Block(256, 82), "IQ2_XS": Block(256, 74), "IQ2_XXS": Block(256, 66),
    "IQ1_M": Block(256, 56), "IQ1_S": Block(256, 50), "MXFP4": Block(32, 17), "NVFP4": Block(64, 36),
    "TQ2_0": Block(256, 66), "TQ1_0": Block(256, 54),
}  # fmt: skip
"""The formats of GGUF that are read, each by its name there, which is the kind of its core too."""
IN_GRIDS = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
"""Those of them whose tables come from the package `gguf`."""


def shared_features(kind: str) -> int:
    """How many input features of a kind of core belong together, so that no cut may go through them."""
    return BLOCKS[kind].elements if kind in BLOCKS else GROUPS.get(kind, 1)


IN_TORCH, IN_TRITON, IN_NUNCHAKU = "torch", "triton", "nunchaku"
"""What multiplies with 4-bit weights: plain torch, kernels of ours, or those of the package nunchaku."""


@dataclass(frozen=True)
class Stored:
    """The `kind` of core that holds it, and the full shape of each of its tensors, by what a file calls them behind the
    name of the Linear (`weight`, `bias`, `weight_scale` ...); none for a plain weight that becomes of that kind as it is
    loaded. Where several Linears are fused in a file, `rows` are the output features of this one; where one is stored as
    several, one for each block of `inputs`, those are `joined`, and `weight@0` is a tensor of the first. `kernels` is what
    multiplies with it where there is a choice.
    """

    kind: str = PLAIN
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: tuple[int, int] | tuple[()] = ()
    joined: tuple[Stored, ...] = ()
    inputs: tuple[int, ...] = ()
    kernels: str = IN_TORCH

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its own kind, and those of the Linears that it is stored as."""
        return (self.kind, *(part.kind for part in self.joined))


def converted(stored: Stored) -> bool:
    """Whether it is packed as it is loaded, so that what is held of it is in no file."""
    return stored.kind in GROUPS and not stored.shapes and not stored.joined
