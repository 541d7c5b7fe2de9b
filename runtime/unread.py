"""What a conditioning carries that a model does not read: refused where a node asks for it, else told of.

The pooled prompt and the mask of its tokens are not among it: every text encoder gives what it has, asked or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .errors import Refused
from .families.spec import FamilySpec
from .protocol import Conditioning

READ_MASKS = {"attention_mask", "word_mask"}
"""What is worked out from the mask of a prompt."""
READ_RATES = {"video_places", "causal_video_places"}
"""What is worked out from the frame rate."""


def sources_of(family: FamilySpec) -> set[str]:
    """What the arguments of a family are taken from or worked out from."""
    return set(dict(family.inputs).values())


def reads_guidance(family: FamilySpec, config: Mapping[str, Any]) -> bool:
    """Whether a model is told a guidance beside cfg."""
    told = config.get(family.guidance_key, True) if family.guidance_key else True
    return "guidance" in sources_of(family) and bool(told)


def check_all_read(conditioning: Conditioning, family: FamilySpec) -> None:
    """Raise `Refused` for a frame rate, a mask beside the latent, or a mask of tokens that a family does not read."""
    rate, title, sources = conditioning.frame_rate, family.title, sources_of(family)
    if rate is not None and sources.isdisjoint(READ_RATES):
        raise Refused(
            f"the conditioning carries a frame_rate of {rate:g}, which {title} does not read: remove LTXVConditioning"
        )
    if conditioning.concat_mask is not None:
        _check_mask_beside(conditioning, family)
    mask = conditioning.attention_mask
    encoder_tells_it = any(use.tells_mask for use in family.texts)
    if mask is not None and encoder_tells_it and sources.isdisjoint(READ_MASKS) and not mask.all():
        raise Refused(
            f"the attention mask of a prompt leaves {int((mask == 0).sum())} of {mask.numel()} tokens out, but {title} reads all "
            f"of them: encode the prompt with CLIP Text Encode, without filling"
        )


def _check_mask_beside(conditioning: Conditioning, family: FamilySpec) -> None:
    """Raise `Refused` for a `concat_mask` that does not count."""
    carried, title = "the conditioning carries a mask to put beside the latent (concat_mask)", family.title
    if not family.beside:
        raise Refused(f"{carried}, but {title} takes none: remove the node that adds it")
    if family.beside == ("picture",):
        raise Refused(
            f"{carried}, but {title} takes a picture alone: use InstructPixToPixConditioning, or remove the mask"
        )
    if "given frames" in family.beside and conditioning.concat_latent is None:
        raise Refused(
            f"{carried} without a picture (concat_latent_image), of which {title} reads it: connect the picture"
        )


def without_effect(conditioning: Conditioning, family: FamilySpec, config: Mapping[str, Any]) -> Iterator[str]:
    """What changes nothing for a model, in words, where ComfyUI's own nodes carry it all the same."""
    guidance, method = conditioning.guidance, conditioning.reference_method
    if guidance is not None and not reads_guidance(family, config) and "guidance" not in dict(family.refuses):
        yield f"guidance {guidance:g} (FluxGuidance) has no effect: {family.title} is told none"
    if method and not conditioning.references:
        yield f"reference_latents_method {method} has no effect: the conditioning carries no reference latents"
