"""How many bytes the call of a Linear takes that is not held as it is multiplied: plain arithmetic on shapes, without torch.

What the call makes counts, its output too; what it is given does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .stored import AWQ_INT4, FOUR_BIT, GROUPS, IN_TORCH, JOINED, PLAIN, SVDQUANT_NVFP4, Stored

AT_ONCE = 1 << 22
"""Numbers of a weight in 4 bits that are unpacked together: enough to keep a GPU busy, and little beside a large weight."""
SIDE = 128
"""The sides of a weight in 4 bits are multiples of it."""
FLOAT = 4
ROUNDING, ROUNDING_FLOATS = 2 * FLOAT, 4 * FLOAT + 1
"""For a number of an input: smoothed, and rounded; to 4-bit floats with its size, its step and a comparison."""
SCALING = 3 * FLOAT
"""For a group of an input: its largest number, its scale, and what is divided by."""
UNPACKING, UNPACKING_FLOATS = 1 + 1 + FLOAT, 1 + 2 * FLOAT
"""For a number of a weight: its code, the same with a sign or as an index, and its value."""
WIDENING_AWQ = 2
"""For a number of a modulation, in the numbers of the inputs: its code, times its scale or with its zero."""
READING: Mapping[str, float] = {
    "Q8_0": 8.1, "Q5_1": 8.1, "Q5_0": 8.1, "Q4_1": 8.1, "Q4_0": 8.1, "Q6_K": 10.3, "Q5_K": 10.2, "Q4_K": 9.2,
    "Q3_K": 16.4, "Q2_K": 9.5, "IQ4_XS": 9.1, "IQ4_NL": 9.1, "IQ3_S": 18.1, "IQ3_XXS": 17.4, "IQ2_S": 17.8,
    "IQ2_XS": 18.3, "IQ2_XXS": 17.4, "IQ1_M": 14.0, "IQ1_S": 13.1, "MXFP4": 9.3, "NVFP4": 9.3, "TQ2_0": 8.0, "TQ1_0": 9.0,
}  # fmt: skip
"""For a number of a weight in the blocks of GGUF, at the widest moment of making it: measured."""


def call_bytes(stored: Stored, shape: Sequence[float], tokens: float, size: int) -> float:
    """The most for a rank's part of a Linear, `(out, in)`, that is given so many tokens in numbers of `size` bytes. Kernels
    make but their output and rounded inputs.
    """
    out, into = shape
    output = tokens * out * size
    if stored.kind == JOINED:
        return _joined(stored, shape, tokens, size)
    if stored.kind in FOUR_BIT and stored.kernels != IN_TORCH:
        return output + (
            0 if stored.kind == AWQ_INT4 else tokens * into * (size if stored.kind == SVDQUANT_NVFP4 else 1)
        )
    if stored.kind == AWQ_INT4:
        return output + out * into * WIDENING_AWQ * size
    if stored.kind in GROUPS:
        return _four_bit(stored.kind, shape, tokens, size)
    if stored.kind in READING:
        return max(out * into * READING[stored.kind], output + out * into * size)
    return output + out * into * size


def changed_call_bytes(
    stored: Stored, shape: Sequence[float], tokens: float, size: int, *, changes: int, whole: int, made: int
) -> float:
    """The most for one whose weight is changed in each call, beside its output: the weight as numbers, what is added to it and
    the sum; then what the input makes of the difference. Of matrices of `whole` numbers `made` are there at once, and where
    there is more than one of the `changes` the sum with those before stays too.
    """
    out, into = shape
    number, output = out * into, tokens * out * size
    read = 0 if stored.kind == PLAIN and size == FLOAT else number
    summed = number if changes > 1 else 0
    reading = READING.get(stored.kind, 0) * number
    return output + max(reading, FLOAT * (read + summed + max(made, number + whole)), number * size + output)


def _four_bit(kind: str, shape: Sequence[float], tokens: float, size: int) -> float:
    """The input is smoothed and rounded; then the weight is unpacked beside that and the output of the low rank,
    and multiplied with.
    """
    out, into = (-(-side // SIDE) * SIDE for side in shape)
    is_float, scale = kind == SVDQUANT_NVFP4, 1 / GROUPS[kind]
    rounding = (ROUNDING_FLOATS if is_float else ROUNDING) + SCALING * scale
    unpacking = (UNPACKING_FLOATS if is_float else UNPACKING) * min(out * into, AT_ONCE)
    beside = tokens * (into + shape[0]) * size + out * into * size
    unpacked = unpacking + out * into * FLOAT * scale
    return max(tokens * into * rounding, beside + max(unpacked, tokens * shape[0] * size))


def _joined(stored: Stored, shape: Sequence[float], tokens: float, size: int) -> float:
    """One after the other, and their outputs beside each other."""
    output, whole = tokens * shape[0] * size, sum(stored.inputs)
    parts = [
        before * output + call_bytes(part, (shape[0], shape[1] * inputs / whole), tokens, size)
        for before, (part, inputs) in enumerate(zip(stored.joined, stored.inputs, strict=True))
    ]
    return max(*parts, (2 * len(parts) + 1) * output)
