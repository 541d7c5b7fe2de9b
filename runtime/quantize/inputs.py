"""Inputs of a model's Linears, kept from runs of it on disk: memory holds no more than one call's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from ..errors import Refused
from ..inspection import ModelFacts
from ..pipeline import Pipeline
from ..progress import ReportProgress, ignore_progress
from ..protocol import Conditioning, Sample
from ..settings import ModelSettings, SampleSettings

STAGE = "calibration"
RANDOM_TOKENS = 64
"""Length of the drawn prompts of a model without a text encoder."""
PICTURE_TOKENS = 257
"""What CLIP vision makes of a picture: 16 x 16 parts of it, and the whole."""


def keep_inputs(
    pipeline: Pipeline,
    linears: Iterable[str],
    folder: Path,
    *,
    settings: ModelSettings,
    prompts: Sequence[str],
    latent: tuple[int, ...],
    steps: int,
    tokens: int,
    progress: ReportProgress,
) -> None:
    """Run each prompt, and write some `tokens` inputs of each Linear to a file of its name: rows of float32."""
    per_call = -(-tokens // (len(prompts) * steps))
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        for name in linears:
            file = stack.enter_context(input_file(folder, name).open("wb"))
            hook = partial(_keep, file=file, count=per_call, generator=generator)
            handle = pipeline.transformer.get_submodule(name).register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        for number, prompt in enumerate(prompts):
            progress(STAGE, number, len(prompts))
            pipeline.sample(_request(pipeline, settings, prompt, latent, steps, number), progress=ignore_progress)
        progress(STAGE, len(prompts), len(prompts))


def read_inputs(folder: Path, name: str, width: int, *, most: int) -> torch.Tensor:
    """Inputs of a Linear, `(T, width)`, evenly from all that were kept. Raises `Refused` when no run reached it."""
    path = input_file(folder, name)
    if not path.is_file() or not path.stat().st_size:
        raise Refused(f"no input of {name} was seen in the runs: give more prompts or steps")
    kept = np.memmap(path, dtype=np.float32, mode="r").reshape(-1, width)
    return torch.from_numpy(kept[np.linspace(0, len(kept) - 1, min(len(kept), most)).astype(np.int64)])


def input_file(folder: Path, name: str) -> Path:
    """Where the inputs of a Linear are kept."""
    return folder / f"{name}.inputs"


def _keep(module: nn.Module, args: tuple[Any, ...], *, file: BinaryIO, count: int, generator: torch.Generator) -> None:
    rows = args[0].flatten(0, -2)
    chosen = torch.randperm(len(rows), generator=generator)[:count]
    file.write(rows[chosen.to(rows.device)].float().cpu().numpy().tobytes())


def _request(
    pipeline: Pipeline, settings: ModelSettings, prompt: str, latent: tuple[int, ...], steps: int, number: int
) -> Sample:
    """A run of a prompt; where the model has no text encoder of its own, of a drawn one."""
    facts = pipeline.facts
    has_text = bool(facts.text_encoders and facts.spec.texts)
    texts = (prompt, "")
    positive, negative = (
        pipeline.encode_text(text, progress=ignore_progress) if has_text else drawn_prompt(facts, 2 * number + place)
        for place, text in enumerate(texts)
    )
    return Sample(
        job="quantize",
        model=settings,
        settings=SampleSettings(steps=steps, seed=number),
        positive=(with_picture(positive, facts, number),),
        negative=(with_picture(negative, facts, number),),
        latent=torch.zeros(latent),
    )


def drawn_prompt(facts: ModelFacts, seed: int) -> Conditioning:
    """Random numbers in the shape of an encoded prompt."""
    generator, spec = torch.Generator().manual_seed(seed), facts.spec
    pooled = torch.randn(1, facts.config[spec.pooled_width], generator=generator) if spec.pooled_width else None
    length = spec.text_length if spec.picture_tokens else RANDOM_TOKENS
    return Conditioning(
        embedding=torch.randn(1, length, facts.config[spec.text_width], generator=generator), pooled=pooled
    )


def with_picture(prompt: Conditioning, facts: ModelFacts, seed: int) -> Conditioning:
    """A prompt, with drawn tokens of a picture where the model has Linears for those alone."""
    if not facts.spec.picture_tokens:
        return prompt
    shape = 1, PICTURE_TOKENS, facts.config[facts.spec.vision_width]
    return prompt.model_copy(update={"clip_vision": torch.randn(shape, generator=torch.Generator().manual_seed(seed))})
