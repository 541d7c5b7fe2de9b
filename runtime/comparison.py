"""How far a latent is from the one that it should be. No torch is imported: the tensors bring what is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

TOLERANCES = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
"""Of the relative error, by the number format of the weights: ranks add the same numbers up in another order."""
FOUR_BIT_TOLERANCE = 0.2
"""Of 4-bit activations: one that lies between two of the 16 levels may fall to either, and later steps follow it."""
MOST_DECIBELS = 300.0
"""Where there is no difference at all."""


@dataclass(frozen=True)
class Comparison:
    """`max_abs`: the largest difference; `rel_err`: norm of the difference over that of the reference; `psnr_db`: peak
    signal to noise ratio, whose peak is the range of the reference.
    """

    max_abs: float
    rel_err: float
    psnr_db: float
    tolerance: float

    @classmethod
    def of(cls, result: Any, reference: Any, *, tolerance: float) -> Comparison:
        """Of two tensors of one shape. A number that is not finite, in either one, makes every figure not finite."""
        difference = (result.double() - reference.double()).abs()
        error, size = float(difference.norm()), float(reference.double().norm())
        spread = float(reference.max() - reference.min())
        return cls(
            max_abs=float(difference.max()),
            rel_err=error / size if size else error,
            psnr_db=_decibels(spread, error / math.sqrt(difference.numel())),
            tolerance=tolerance,
        )

    @property
    def ok(self) -> bool:
        """Whether the result is the reference, but for rounding."""
        return self.rel_err <= self.tolerance  # False where it is not a number

    def __str__(self) -> str:
        return (
            f"{'the same' if self.ok else 'NOT the same'}: relative error {self.rel_err:.2g} (at most {self.tolerance:g} "
            f"is right), largest difference {self.max_abs:.2g}, PSNR {self.psnr_db:.0f} dB"
        )


def _decibels(spread: float, error: float) -> float:
    if error == 0:
        return MOST_DECIBELS
    return min(20 * math.log10(spread / error), MOST_DECIBELS) if spread > 0 else -MOST_DECIBELS


def tolerance_for(dtype: str, *, four_bit: bool = False) -> float:
    """How large a relative error is rounding, with weights of this number format."""
    return max(TOLERANCES[dtype], FOUR_BIT_TOLERANCE if four_bit else 0.0)
