"""A plain Euler loop over the diffusers classes, the same as ComfyUI's euler on its simple schedule."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, UMT5EncoderModel

from . import MODEL_FOLDER
from .autoencoder import decode_clips, denormalise
from .scenes import SIZE
from .text import encode_prompts

STEPS, SHIFT, GUIDANCE = 20, 8.0, 5.0


@dataclass(frozen=True)
class Model:
    """The parts that sampling needs."""

    tokenizer: PreTrainedTokenizerFast
    text_encoder: UMT5EncoderModel
    transformer: WanTransformer3DModel
    autoencoder: AutoencoderKLWan


def load_model(folder: Path = MODEL_FOLDER, dtype: torch.dtype = torch.float32) -> Model:
    """Read a diffusers folder; the weights are stored in bfloat16 and computed with in `dtype`."""
    return Model(
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
        UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval(),
        WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=dtype).eval(),
        AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=dtype).eval(),
    )


def simple_sigmas(steps: int = STEPS, shift: float = SHIFT) -> Tensor:
    """(steps + 1,) noise levels from 1 to 0, even before the shift."""
    even = torch.linspace(1, 0, steps + 1)
    return shift * even / (1 + (shift - 1) * even)


@torch.no_grad()
def sample_latents(
    model: Model, prompts: list[str], *, frames: int = 1, seed: int = 0, steps: int = STEPS, guidance: float = GUIDANCE
) -> Tensor:
    """Normalised latents (B, 16, 1 + (frames - 1) / 4, h, w); prompt i starts from the noise of seed + i."""
    shape = (1, 16, 1 + (frames - 1) // 4, SIZE // 8, SIZE // 8)
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    x = torch.cat([torch.randn(shape, generator=generator) for generator in generators])
    text = encode_prompts(model.tokenizer, model.text_encoder, [*prompts, *[""] * len(prompts)])
    sigmas = simple_sigmas(steps)
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        timestep = (sigma * 1000).expand(2 * len(prompts))
        positive, negative = model.transformer(torch.cat([x, x]), timestep, text, return_dict=False)[0].chunk(2)
        x = x + (following - sigma) * (negative + guidance * (positive - negative))
    return x


@torch.no_grad()
def to_frames(model: Model, latent: Tensor) -> np.ndarray:
    """Normalised latents -> (B, T, H, W, 3), float32 from 0 to 1."""
    raw = denormalise(model.autoencoder, latent)
    pixels = torch.cat([decode_clips(model.autoencoder, one) for one in raw.split(1)])
    return pixels.clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1).numpy()
