"""The two number formats of SVDQuant, and the rounding of activations to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...stored import SVDQUANT_INT4, SVDQUANT_INT4_UNSIGNED, SVDQUANT_NVFP4
from ..bits import E2M1

SHIFT = 0.171875
"""What is added to the output of a GELU, which is never below -0.1701, so that its codes need no sign."""
E4M3_MAX, E2M1_MAX = 448.0, 6.0
INT4_MAX, UINT4_MAX = 7, 15


@dataclass(frozen=True)
class Format:
    """`group` features share a scale of `scale_dtype`. `unsigned`: activations come from a GELU and are shifted."""

    name: str
    group: int
    scale_dtype: torch.dtype
    unsigned: bool = False

    @property
    def is_float(self) -> bool:
        """Whether the codes are E2M1 floats, not integers."""
        return self.scale_dtype == torch.float8_e4m3fn

    @property
    def largest(self) -> float:
        """The largest number that an activation's code can stand for."""
        return E2M1_MAX if self.is_float else UINT4_MAX if self.unsigned else INT4_MAX


INT4 = Format("int4", 64, torch.bfloat16)
UNSIGNED_INT4 = Format("int4", 64, torch.bfloat16, unsigned=True)
NVFP4 = Format("nvfp4", 16, torch.float8_e4m3fn)
FORMATS: Mapping[str, Format] = {
    SVDQUANT_INT4: INT4,
    SVDQUANT_INT4_UNSIGNED: UNSIGNED_INT4,
    SVDQUANT_NVFP4: NVFP4,
}
"""By `Stored.kind`."""


def code_values(codes: torch.Tensor, form: Format) -> torch.Tensor:
    """What codes from 0 to 15 stand for: two's complement, or E2M1 (a sign, two bits of exponent, one of mantissa)."""
    if not form.is_float:
        return ((codes.to(torch.int8) ^ 8) - 8).float()
    return codes.new_tensor(E2M1, dtype=torch.float32)[codes.int()]


def value_codes(values: torch.Tensor, form: Format) -> torch.Tensor:
    """The codes of values that a format has: uint8 from 0 to 15."""
    if not form.is_float:
        return values.to(torch.int8).view(torch.uint8) & 15
    magnitudes = torch.tensor(E2M1[:8], device=values.device)
    return torch.bucketize(values.abs().float(), magnitudes).to(torch.uint8) + (values < 0).to(torch.uint8) * 8


def round_to_codes(values: torch.Tensor, form: Format) -> torch.Tensor:
    """The nearest values that a weight's code can stand for; of two the one with the even code."""
    return round_e2m1(values) if form.is_float else values.round().clamp_(-INT4_MAX, INT4_MAX)


def round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with either sign."""
    size = values.abs()
    step = torch.full_like(size, 0.5).add_(size >= 2, alpha=0.5).add_(size >= 4)
    del size
    return (values / step).round_().mul_(step).clamp_(-E2M1_MAX, E2M1_MAX)


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The nearest 8-bit floats, as they are stored for a scale."""
    return values.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(values.dtype)


def round_activations(x: torch.Tensor, form: Format) -> torch.Tensor:
    """`(..., K)` in 4 bits: each token and group of features with its own scale. In the dtype of `x`."""
    groups = x.unflatten(-1, (-1, form.group))
    largest = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True))
    scale = largest / form.largest
    scale = round_e4m3(scale) if form.is_float else scale
    values = groups / scale.where(scale > 0, 1)
    values = round_e2m1(values) if form.is_float else values.round_()
    return values.mul_(scale).flatten(-2)
