"""LoRAs on a pair of experts: each on the one that it is for, or on both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..settings import BOTH_EXPERTS, EXPERTS, LoraSettings
from .apply import Loras
from .fitting import for_the_only_one

_NAMED = re.compile(r"(?<![a-z])(high|low)(?=[-_ ]?noise|[^a-z]|$)", re.IGNORECASE)
"""How files for one expert are called: `..._high_noise_...`, `HighNoise`, `wan22-low.safetensors`."""


def use_on(experts: Sequence[Loras], loras: Iterable[LoraSettings]) -> tuple[str, ...]:
    """Run a model of one transformer, or a pair of them, with these and no others; lines to tell of each.

    Raises `Refused` when one of them cannot be used; then nothing has changed.
    """
    chosen = [lora for lora in loras if lora.strength]
    if len(experts) == 1:
        return experts[0].use(for_the_only_one(chosen))
    own = [[lora for lora in chosen if lora.expert in (BOTH_EXPERTS, name)] for name in EXPERTS]
    for expert, each in zip(experts, own, strict=True):
        expert.check(each)
    told = [
        f"{name}: {line}" for name, expert, each in zip(EXPERTS, experts, own, strict=True) for line in expert.use(each)
    ]
    return (*told, *filter(None, map(_doubt, chosen)))


def _doubt(lora: LoraSettings) -> str:
    """What to tell of a file whose name says that it is for another expert than it is put on."""
    found = {f"{word.lower()} noise" for word in _NAMED.findall(Path(lora.path).stem)}
    if len(found) != 1 or found == {lora.expert}:
        return ""
    on = "both experts" if lora.expert == BOTH_EXPERTS else f"the expert of {lora.expert}"
    return f"{Path(lora.path).name} is on {on}, but its name says {found.pop()}: choose that as expert"
