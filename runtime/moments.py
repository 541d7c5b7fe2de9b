"""What a rank holds at a moment of a block, in bytes: plain arithmetic on widths, without torch."""

from __future__ import annotations

from .families.cuts import Moment
from .inspection import ModelFacts


def moment_bytes(moment: Moment, facts: ModelFacts, tensor: int, image: int, text: int, size: int) -> float:
    """Bytes that an item has at a moment, of so many tokens of the picture and of the prompt."""
    width, heads = facts.heads * facts.head_dim, heads_width(facts, tensor)
    token = moment.whole * width + moment.cut * heads + moment.hidden * facts.hidden * heads / width
    return size * (image * token + text * (token if moment.text is None else moment.text * width))


def heads_width(facts: ModelFacts, tensor: int) -> int:
    """Features of the heads of the rank that has most."""
    return -(-facts.heads // tensor) * facts.head_dim
