"""The tokens of a picture that Wan reads beside those of the prompt, as ComfyUI hands them to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TEXT, PICTURE = 2, 3
"""Places in the output of the module that embeds both."""


def read_pictures(embedder: nn.Module) -> None:
    """Have Wan's embedder do without a picture, and with one where it has positions for two. Puts hooks on it.

    In the place of a picture that is not there ComfyUI has the tokens of the prompt.
    """
    embedder.register_forward_hook(_prompt_for_picture)
    pictures = embedder.image_embedder
    if pictures.pos_embed is not None:
        window = _Positions(pictures.pos_embed.shape[1])
        pictures.register_forward_pre_hook(window.fill)
        pictures.register_forward_hook(window.cut)


def _prompt_for_picture(module: nn.Module, args: tuple, output: tuple) -> Any:
    picture = output[TEXT] if output[PICTURE] is None else output[PICTURE]
    return (*output[:PICTURE], picture)


class _Positions:
    """Around the embedder of the tokens of two pictures, which diffusers has in turn along the batch: those that are missing
    are zeros, and left out of its output again.
    """

    def __init__(self, positions: int) -> None:
        self._positions, self._tokens = positions, positions

    def fill(self, module: nn.Module, args: tuple) -> tuple:
        [tokens] = args
        self._tokens = min(tokens.shape[1], self._positions)
        tokens = F.pad(tokens[:, : self._positions], (0, 0, 0, self._positions - self._tokens))
        return (tokens.reshape(-1, self._positions // 2, tokens.shape[2]),)

    def cut(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output[:, : self._tokens]
