"""A weight in 4 bits for inputs in 16 (AWQ, Lin et al. 2023, arXiv:2306.00978): the modulation of Nunchaku's files.

Files have the rows of modulation in the order (feature, part), where the class has (part, feature), and a 1 added to the
biases of what the class itself adds 1 to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.shares import Cut
from ..stored import Stored
from .core import Core

GROUP = 64
LARGEST = 15
AT_ONCE = 256
"""Features of which the modulation is rounded together."""


def unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """`(N / 4, K / 2)` int32 -> `(N, K)` uint8 codes. Four rows lie side by side, 64 columns of each; a 16-bit word has the
    columns k, k + 8, k + 16, k + 24.
    """
    fours, k = packed.shape[0], 2 * packed.shape[1]
    words = packed.contiguous().view(torch.int16).reshape(fours, k // GROUP, 4, 2, 8).int()
    codes = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], dim=-2)  # four tile row half nibble word
    return codes.permute(0, 2, 1, 3, 4, 5).reshape(4 * fours, k).to(torch.uint8)


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """`(N, K)` codes from 0 to 15 -> `(N / 4, K / 2)` int32."""
    n, k = codes.shape
    words = codes.int().reshape(n // 4, 4, k // GROUP, 2, 4, 8).permute(0, 2, 1, 3, 5, 4)  # nibbles last
    packed = (words << torch.arange(0, 16, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return packed.to(torch.int16).contiguous().view(torch.int32).reshape(n // 4, k // 2)


def awq_linear(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A modulation as a file has it, its weight rounded to the nearest: `(parts * features, features)` as it is stored, some
    features at a time.
    """
    features = weight.shape[1]
    parts = weight.shape[0] // features
    lifted = bias.float().unflatten(0, (parts, features)).clone()
    for part in _scales(parts):
        lifted[part] += 1
    blocks = weight.unflatten(0, (parts, features)).transpose(0, 1).split(AT_ONCE)
    codes, scales, zeros = zip(*(_round_rows(block.flatten(0, 1).float(), dtype) for block in blocks), strict=True)
    return {
        "qweight": torch.cat(codes),
        "wscales": torch.cat(scales).T.contiguous(),
        "wzeros": torch.cat(zeros).T.contiguous(),
        "bias": lifted.T.flatten().to(dtype),
    }


def _round_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, scales and zeros of rows."""
    groups = rows.unflatten(1, (-1, GROUP))
    zeros = groups.amin(-1).to(dtype)
    scales = ((groups.amax(-1) - zeros.float()) / LARGEST).clamp(min=torch.finfo(torch.float16).tiny).to(dtype)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(0, LARGEST)
    return pack_awq(codes.flatten(1)), scales, zeros


def _scales(parts: int) -> tuple[int, ...]:
    """Which parts of a modulation the class adds 1 to: of each (shift, scale, gate) the second."""
    return tuple(range(1, parts, 3)) if parts > 1 else ()


@dataclass(frozen=True)
class AWQCut:
    """The rows of a cut in the order of the class, of one of the tensors; codes two in a byte."""

    leaf: str
    parts: int
    cut: Cut

    def take(self, full: Any) -> torch.Tensor:
        """From a tensor as a file has it, or a slice of a safetensors file."""
        tensor = full[:]
        if self.leaf == "qweight":
            tensor = unpack_awq(tensor)
        elif self.leaf != "bias":
            tensor = tensor.T
        rows = tensor.unflatten(0, (-1, self.parts)).transpose(0, 1)
        if self.leaf == "bias":
            rows = rows.clone()
            for part in _scales(self.parts):
                rows[part] -= 1
        rows = self.cut.take(rows.flatten(0, 1)).contiguous()
        return rows[:, ::2] | rows[:, 1::2] << 4 if self.leaf == "qweight" else rows


class AWQCore(Core):
    """`y = x (codes * scale + zero)^T`, a scale and a zero for 64 features of a row."""

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__(linear, cut, stored)
        n = cut.take(linear.weight).shape[0]
        groups = stored.shapes["wscales"][0]
        for leaf, shape, dtype in (
            ("qweight", (n, linear.in_features // 2), torch.uint8),
            ("wscales", (n, groups), linear.weight.dtype),
            ("wzeros", (n, groups), linear.weight.dtype),
        ):
            held = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(leaf, nn.Parameter(held, requires_grad=False))
        self._parts = linear.out_features // linear.in_features

    def part(self, leaf: str) -> AWQCut:
        return AWQCut(leaf, self._parts, self.cut)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        return F.linear(x, self._widened(x.dtype), bias)

    def matrix(self) -> torch.Tensor:
        """What the codes stand for."""
        return self._widened(torch.float32)

    def _widened(self, dtype: torch.dtype) -> torch.Tensor:
        codes = torch.stack([self.qweight & 15, self.qweight >> 4], dim=-1).flatten(1).to(dtype)
        groups = codes.unflatten(1, (-1, GROUP))
        scales, zeros = (tensor[:, : groups.shape[1], None].to(dtype) for tensor in (self.wscales, self.wzeros))
        return (groups * scales + zeros).flatten(1)
