"""What commands sample: empty latents, and prompts that are drawn and not encoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import Refused
from ..families.spec import LatentFormat
from ..inspection import ModelFacts
from ..message import Conditioning

DRAWN_LENGTHS = (19, 12)
"""Tokens of a drawn prompt and of the negative one: neither alike nor even."""
MIDDLE_LENGTH = 15
"""Of one between them."""

MOST = 16384
"""Of pixels along a side, and of frames: ComfyUI's own bound."""


def empty_latent(form: LatentFormat, *, width: int, height: int, frames: int, batch: int = 1) -> torch.Tensor:
    """Zeros of the shape that a picture or video of this size has. Raises `Refused` for a size that none has."""
    for name, size in (("width", width), ("height", height)):
        if size < form.spatial or size % form.spatial:
            raise Refused(f"{name} {size} is no multiple of {form.spatial}: set it to one")
    for name, size in (("width", width), ("height", height), ("frames", frames)):
        if size > MOST:
            raise Refused(f"{name} is {size}: set it to {MOST} or less")
    if form.dims == 2 and frames > 1:
        raise Refused(f"frames is {frames}, but this model makes pictures: set it to 1")
    if frames < 1 or (frames - 1) % form.temporal:
        raise Refused(f"frames is {frames}: set it to 1, or 1 more than a multiple of {form.temporal}")
    sizes = [] if form.dims == 2 else [(frames - 1) // form.temporal + 1]
    return torch.zeros(batch, form.channels, *sizes, height // form.spatial, width // form.spatial)


def drawn_conditioning(facts: ModelFacts, lengths: Sequence[int] = DRAWN_LENGTHS) -> tuple[Conditioning, ...]:
    """Random numbers in the place of encoded prompts of these lengths, of the widths that the model reads."""
    generator = torch.Generator().manual_seed(0)
    width, pooled_width = (facts.config.get(key, 0) for key in (facts.spec.text_width, facts.spec.pooled_width))

    def drawn(length: int) -> Conditioning:
        embedding = torch.randn(1, length, width, generator=generator)
        pooled = torch.randn(1, pooled_width, generator=generator) if pooled_width else None
        return Conditioning(embedding=embedding, pooled=pooled)

    return tuple(map(drawn, lengths))
