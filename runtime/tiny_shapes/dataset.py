"""Training data of the transformer: scenes and their normalised latents, encoded once."""

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from .autoencoder import encode_clips, encode_pictures, normalise, picture_view, to_tensor
from .scenes import Scene, draw, draw_clip, random_scene

CLIP_STANDS_STILL = 0.2
"""How many clips show a scene without motion."""


@dataclass(frozen=True)
class LatentSet:
    """Scenes and their latents, (N, 16, T, h, w) with mean 0 and deviation 1 in each channel."""

    scenes: tuple[Scene, ...]
    latents: Tensor

    def __len__(self) -> int:
        return len(self.scenes)


@torch.no_grad()
def make_pictures(autoencoder: AutoencoderKLWan, count: int, seed: int = 3) -> LatentSet:
    """`count` random still scenes at native size, one latent frame each."""
    random, view = np.random.default_rng(seed), picture_view(autoencoder)
    scenes = tuple(random_scene(random) for _ in range(count))
    latents = [
        encode_pictures(view, to_tensor(np.stack([draw(scene) for scene in group])[:, None]))
        for group in _groups(scenes, 16)
    ]
    return LatentSet(scenes, normalise(autoencoder, torch.cat(latents)))


@torch.no_grad()
def make_clips(autoencoder: AutoencoderKLWan, count: int, seed: int = 4) -> LatentSet:
    """`count` random clips at native size, most of them moving."""
    random = np.random.default_rng(seed)
    scenes = tuple(random_scene(random, moving=random.random() >= CLIP_STANDS_STILL) for _ in range(count))
    latents = [
        encode_clips(autoencoder, to_tensor(np.stack([draw_clip(scene) for scene in group])))
        for group in _groups(scenes, 4)
    ]
    return LatentSet(scenes, normalise(autoencoder, torch.cat(latents)))


def _groups(scenes: tuple[Scene, ...], size: int) -> list[tuple[Scene, ...]]:
    return [scenes[start : start + size] for start in range(0, len(scenes), size)]
