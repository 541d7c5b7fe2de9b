"""The transformer: a narrow `WanTransformer3DModel` trained by rectified flow in the space of normalised latents.

With noise level sigma from 0 to 1 the input is (1 - sigma) x0 + sigma noise, the timestep is 1000 sigma and the
target is noise - x0: what ComfyUI and diffusers assume of Wan.
"""

import copy
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from .autoencoder_training import Progress
from .dataset import LatentSet
from .scenes import MOVING_TEMPLATES, STILL_TEMPLATES, Scene, format_prompt
from .text import EMBEDDING, LENGTH, encode_prompts

CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": EMBEDDING,
    "freq_dim": 256,
    "ffn_dim": 512,
    "num_layers": 4,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}

LEARNING_RATE, RESUMED_RATE = 1.5e-3, 8e-4
WARM_UP = 100
EMPTY_PROMPTS = 0.1
"""How many prompts are left out, for classifier-free guidance."""
PICTURES, CLIPS = 24, 8
"""Batch sizes, for about as many tokens in either kind of batch."""
SHIFTS = (8.0, 8.0, 3.0, 1.0)
"""Noise levels are drawn evenly and shifted by one of these: most of the training is where a shift of 8 spends its
steps, some is at the low levels that its last step jumps over."""


def build_transformer(seed: int = 0) -> WanTransformer3DModel:
    """A fresh transformer: open gates, no modulation, and a prediction of zero."""
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(**CONFIG)
    with torch.no_grad():
        transformer.proj_out.weight.zero_()
        transformer.proj_out.bias.zero_()
        transformer.scale_shift_table.zero_()
        transformer.condition_embedder.time_proj.weight.mul_(0.2)
        transformer.condition_embedder.time_proj.bias.zero_()
        for block in transformer.blocks:
            block.scale_shift_table.zero_()
            block.scale_shift_table[:, [2, 5]] = 0.7
    return transformer


class PromptCache:
    """Prompt embeddings without their rows of padding, computed once each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text_encoder: UMT5EncoderModel) -> None:
        self._encode = lambda prompt: encode_prompts(tokenizer, text_encoder, [prompt])[0]
        self._rows: dict[str, Tensor] = {}

    def __call__(self, prompts: list[str]) -> Tensor:
        """(B, LENGTH, EMBEDDING)."""
        result = torch.zeros(len(prompts), LENGTH, EMBEDDING)
        for index, prompt in enumerate(prompts):
            if prompt not in self._rows:
                full = self._encode(prompt)
                self._rows[prompt] = full[full.abs().sum(dim=1) > 0]
            rows = self._rows[prompt]
            result[index, : len(rows)] = rows
        return result


def random_prompt(random: np.random.Generator, scene: Scene) -> str:
    """One of the scene's prompts, or sometimes none."""
    if random.random() < EMPTY_PROMPTS:
        return ""
    return format_prompt(scene, int(random.integers(len(MOVING_TEMPLATES if scene.motion else STILL_TEMPLATES))))


def random_sigmas(random: np.random.Generator, count: int) -> Tensor:
    """(count,) noise levels, spread evenly before the shift."""
    even = (random.permutation(count) + random.random(count)) / count
    shift = random.choice(SHIFTS, size=count)
    return torch.from_numpy(shift * even / (1 + (shift - 1) * even)).float()


def flow_loss(transformer: WanTransformer3DModel, latent: Tensor, text: Tensor, sigma: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity."""
    noise = torch.randn_like(latent)
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * latent + level * noise
    predicted = transformer(noisy, sigma * 1000, text, return_dict=False)[0]
    return F.mse_loss(predicted, noise - latent)


def build_optimizer(transformer: WanTransformer3DModel) -> torch.optim.AdamW:
    """Adam moves an output by the rate times its inputs: the wide text projection gets a sixteenth of the rate."""
    wide = transformer.condition_embedder.text_embedder.linear_1
    others = [parameter for parameter in transformer.parameters() if parameter is not wide.weight]
    groups = [{"params": others, "factor": 1.0}, {"params": [wide.weight], "factor": 1 / 16}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, progress: float) -> None:
    """Linear warm-up over steps, then a cosine over time, to 1 % of the peak at `progress` 1."""
    rate = peak * min(1, (step + 1) / WARM_UP) * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * progress)))
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


@torch.no_grad()
def update_average(average: WanTransformer3DModel, current: WanTransformer3DModel, step: int) -> None:
    """Exponential moving average of the weights, short at first."""
    weight = 1 - min(0.998, (1 + step) / (20 + step))
    torch._foreach_lerp_(list(average.parameters()), list(current.parameters()), weight)


def train_transformer(
    transformer: WanTransformer3DModel,
    pictures: LatentSet,
    clips: LatentSet,
    prompts: PromptCache,
    checkpoint: Path,
    minutes: float,
    report: Progress = print,
    peak: float = LEARNING_RATE,
) -> WanTransformer3DModel:
    """Train for `minutes` and give back the averaged weights, saved to `checkpoint` every minute as well.

    The first quarter sees pictures alone; then every fourth batch is one of clips.
    """
    random = np.random.default_rng(5)
    average = copy.deepcopy(transformer).requires_grad_(False)
    optimizer = build_optimizer(transformer)
    start, saved, step, losses = time.monotonic(), 0.0, 0, []
    while (elapsed := time.monotonic() - start) < minutes * 60:
        progress = elapsed / (minutes * 60)
        set_rate(optimizer, peak, step, progress)
        source, count = (clips, CLIPS) if progress > 0.25 and step % 4 == 0 else (pictures, PICTURES)
        chosen = random.integers(len(source), size=count)
        text = prompts([random_prompt(random, source.scenes[index]) for index in chosen])
        loss = flow_loss(transformer, source.latents[chosen], text, random_sigmas(random, count))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        update_average(average, transformer, step)
        losses.append(loss.item())
        if step % 25 == 24:
            report(f"transformer {elapsed:6.0f} s  step {step}  loss {np.mean(losses[-25:]):.4f}")
        if elapsed - saved > 60:
            torch.save(average.state_dict(), checkpoint)
            saved = elapsed
        step += 1
    torch.save(average.state_dict(), checkpoint)
    return average
