"""How the families read their text encoders, as ComfyUI's CLIP Loader does by its type: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TextUse:
    """What a family takes of one text encoder.

    `kind` is ComfyUI's name of the encoder. It `gives` a vector for each token, or one for the whole prompt ("pooled"), or
    both; those of the tokens come from the last `layer` (0) behind the final norm, or from one before it (-2), without that.
    A prompt is filled up to `length` tokens; where `section` is not 0 it is cut into sections of so many. `masked`: no
    token attends to the filling, and `zeroed`: what becomes of that is zero; `tells_mask`: the model is told which it is.
    The prompt stands in the place of `{}` in the `template`, unless it begins as one of `own_templates` does; with
    `after_template` the tokens before the user's turn are left out.

    `weighted`: `(word:1.2)` counts, by the distance from an empty prompt, which has no end where `blank_end` is False. The
    model runs without an `optional` one as well.
    """

    kind: str
    gives: Literal["tokens", "pooled", "both"] = "tokens"
    layer: int = 0
    length: int = 1
    section: int = 0
    masked: bool = False
    zeroed: bool = False
    tells_mask: bool = False
    template: str = "{}"
    own_templates: tuple[str, ...] = ()
    after_template: bool = False
    weighted: bool = True
    blank_end: bool = True
    optional: bool = False


UMT5 = (TextUse("umt5xxl", length=512, masked=True, zeroed=True),)
"""Wan."""
CLIP_AND_T5 = (TextUse("clip_l", gives="pooled", length=77, section=77), TextUse("t5xxl", length=256))
"""Flux.1."""
CLIPS_AND_T5 = (
    TextUse("clip_l", gives="both", layer=-2, length=77, section=77),
    TextUse("clip_g", gives="both", layer=-2, length=77, section=77),
    TextUse("t5xxl", length=77, optional=True),
)
"""Stable Diffusion 3: the tokens of the two CLIPs side by side, and those of T5 behind them."""
JOINED_WIDTH = 4096
"""That of the tokens of T5, which those of the two CLIPs are filled up to."""
BARE_T5 = (TextUse("t5xxl", blank_end=False),)
"""Chroma."""
MASKED_T5 = (TextUse("t5xxl", length=128, masked=True, tells_mask=True),)
"""LTX-Video."""
GEMMA2 = (TextUse("gemma2_2b", layer=-2, masked=True, tells_mask=True),)
"""Lumina-Image 2.0."""
QWEN3 = (
    TextUse(
        "qwen3_4b",
        layer=-2,
        masked=True,
        tells_mask=True,
        template="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        weighted=False,
    ),
)
"""Z-Image; the template is that of Qwen3's chat."""
QWEN25_VL = (
    TextUse(
        "qwen25_7b",
        masked=True,
        tells_mask=True,
        template=(
            "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
            "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        ),
        own_templates=("<|im_start|>", "<|start_header_id|>"),
        after_template=True,
        weighted=False,
    ),
)
"""Qwen-Image; the template is the one that it was trained with."""
