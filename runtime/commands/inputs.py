"""What commands sample: empty latents, and prompts that are drawn and not encoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..families.spec import LatentFormat
from ..inspection import ModelFacts
from ..message import Conditioning
from .sizes import latent_shape

DRAWN_LENGTHS = (19, 12)
"""Tokens of a drawn prompt and of the negative one: neither alike nor even."""
MIDDLE_LENGTH = 15
"""Of one between them."""


def empty_latent(form: LatentFormat, *, width: int, height: int, frames: int, batch: int = 1) -> torch.Tensor:
    """Zeros of the shape that a picture or video of this size has. Raises `Refused` for a size that none has."""
    return torch.zeros(latent_shape(form, width=width, height=height, frames=frames, batch=batch))


def drawn_conditioning(facts: ModelFacts, lengths: Sequence[int] = DRAWN_LENGTHS) -> tuple[Conditioning, ...]:
    """Random numbers in the place of encoded prompts of these lengths, of the widths that the model reads."""
    generator = torch.Generator().manual_seed(0)
    width, pooled_width = (facts.config.get(key, 0) for key in (facts.spec.text_width, facts.spec.pooled_width))

    def drawn(length: int) -> Conditioning:
        length = facts.spec.text_length if facts.spec.picture_tokens else length
        embedding = torch.randn(1, length, width, generator=generator)
        pooled = torch.randn(1, pooled_width, generator=generator) if pooled_width else None
        return Conditioning(embedding=embedding, pooled=pooled)

    return tuple(map(drawn, lengths))
