"""Whether several GPUs are faster than one: what sharing a step saves against what its exchanges take. No torch.

The numbers are round ones of today's machines, so that the answer is a hint: it is off where a link or a GPU is.
"""

from __future__ import annotations

import math

from .degrees import Degrees
from .facts import ModelFacts

OPERATIONS = 100e12
"""That a GPU does in a second in 16 bits, in matrices of this size."""
LINK = 25e9
"""Bytes that it sends in a second: PCIe 4.0 with 16 lanes."""
START = 20e-6
"""Seconds to start an exchange and wait for the others."""
STEP = 300e-6
"""Seconds in which the ranks agree on going on with the next step: a round of gloo, as measured."""
USUAL_TOKENS = 4096
"""Of a picture of 1024 x 1024."""
ELEMENT = 2


def saves_time(facts: ModelFacts, degrees: Degrees, *, tokens: int = USUAL_TOKENS) -> bool:
    """Whether a step of so many tokens is done sooner by these ranks than by one.

    Of the work, two operations for each weight of a block and token, every rank does its part. An attention sends query,
    key, value and output once (Ulysses) or keys and values all around (ring), and tensor parallel adds two outputs up.
    """
    blocks = sum(
        len({name.split(".")[1] for name in facts.shapes if name.startswith(f"{each}.")}) for each in facts.spec.blocks
    )
    weights = sum(math.prod(shape) for name, shape in facts.shapes.items() if name.startswith(facts.spec.blocks))
    saved = 2 * weights * tokens * (1 - 1 / degrees.product) / OPERATIONS
    local = tokens / (degrees.ring * degrees.ulysses) * facts.heads * facts.head_dim * ELEMENT
    ring, ulysses, tensor = degrees.ring - 1, degrees.ulysses - 1, degrees.tensor - 1
    sent = 4 * local * ulysses / degrees.ulysses + 2 * local * ring + 4 * local * tensor
    exchanges = 4 * (ulysses > 0) + ring + 2 * (tensor > 0)
    return saved > STEP + blocks * (exchanges * START + sent / degrees.tensor / LINK)
