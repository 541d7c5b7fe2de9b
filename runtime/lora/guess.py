"""Which model a LoRA is for, when it is not for this one. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..families import FAMILIES
from ..inspection import RANDOM, inspect_model
from .names import LayerNames

_OTHERS = (
    (r"(down|mid|up|input|middle|output)_blocks?[._]", "Stable Diffusion 1.5 or SDXL"),
    (r"joint_blocks[._]|transformer_blocks[._]\d+[._]norm1_context[._]linear_2", "Stable Diffusion 3"),
    (r"(double|single)_blocks[._]\d+[._](img|txt)_(attn|mlp)|single_blocks[._]\d+[._](linear1|modulation)", "Flux or HunyuanVideo"),
    (r"single_transformer_blocks[._]", "Flux"),
    (r"transformer_blocks[._]\d+[._](img|txt)_(mod|mlp)", "Qwen-Image"),
    (r"blocks[._]\d+[._](self|cross)_attn[._]", "Wan"),
    (r"layers[._]\d+[._](attention|feed_forward|adaLN)", "Z-Image or Lumina 2"),
    (r"transformer_blocks[._]\d+[._]attn[12][._]", "LTX-Video or PixArt"),
)  # fmt: skip
"""Names that give away models which may be of no family here. Looked through after the families."""
SURE = 0.5


def likely_family(layers: Collection[str], *, but: str) -> str:
    """What a file with these layers was made for, other than the family `but`; empty when that cannot be told. Relatives that
    fit alike are all named.
    """
    numbered = [re.sub(r"(?<=[._])\d+", "0", layer, count=1) for layer in layers]  # a tiny model has every block once
    shares = {name: _share(numbered, name) for name in FAMILIES if name != but}
    most = max(shares.values(), default=0.0)
    if most >= SURE:
        return ", ".join(FAMILIES[name].title for name, share in shares.items() if share == most)
    for pattern, title in _OTHERS:
        if sum(bool(re.search(pattern, layer)) for layer in layers) >= SURE * len(layers):
            return title
    return ""


def _share(layers: list[str], family: str) -> float:
    """How many of the layers a family has, as a part of all."""
    names = LayerNames(FAMILIES[family], inspect_model(f"{RANDOM}{family}").shapes)
    return sum(bool(names.find(layer)) for layer in layers) / max(len(layers), 1)
