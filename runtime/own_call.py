"""A request as the arguments of a pipeline of diffusers, read off its signature; what has no argument is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import Refused
from .progress import ReportProgress
from .prompt_text import text_of
from .protocol import Conditioning, Sample
from .settings import SampleSettings
from .steps import SAMPLING
from .without_spec import OwnPipeline

NEEDED = ("prompt", "num_inference_steps", "generator", "height", "width", "output_type")
PICTURES = ("image", "images", "video", "control_image", "control_video", "mask_image", "image_latents")
"""Arguments of pipelines that work from pictures."""
BATCHES = ("num_images_per_prompt", "num_videos_per_prompt")
FRAMES = ("num_frames", "video_length", "frames")
CHUNK = "decode_chunk_size"
"""How many frames are decoded together, of those that do it frame by frame: here all, which comes to one latent."""
REPORTS = ("callback_on_step_end", "callback")
"""How a pipeline tells of its steps; the second is that of older ones."""
SPATIAL = ("vae_scale_factor_spatial", "vae_spatial_scale_factor", "vae_spatial_compression_ratio", "vae_scale_factor")
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_scale_factor", "vae_temporal_compression_ratio")
"""What pipelines call how far they scale down."""
EMPTY_SPATIAL = 8
"""What ComfyUI's empty latents are made for, where they do not say."""
FREE = ("seed", "steps", "cfg", "base_shift")
"""Widgets that any value may have; the last counts only beside another."""
INPUTS = {
    "middle": "three prompts", "noise_mask": "a noise mask", "noise": "NOISE", "sigmas": "SIGMAS", "batch_index": "batch_index",
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a class of pipelines is called: the names of its arguments."""

    kind: str
    names: frozenset[str]

    @classmethod
    def of(cls, kind: type, found: OwnPipeline) -> Way:
        """Raises `Refused` for one that needs more than a prompt, or takes less than a Sampler gives."""
        names = frozenset(inspect.signature(kind.__call__).parameters)
        pictures = next((name for name in PICTURES if name in names), "")
        if pictures:
            raise Refused(
                f"{found.path} is a {found.kind}, which works from pictures ({pictures}): choose a text-to-image model"
            )
        lacking = [name for name in NEEDED if name not in names]
        for choices in (REPORTS, ("guidance_scale", "true_cfg_scale")):
            lacking += [] if names & {*choices} else [choices[0]]
        if lacking:
            raise Refused(
                f"{found.path} is a {found.kind}, which takes no {', '.join(lacking)}, so that a Sampler cannot run it: "
                f"choose another model"
            )
        return cls(found.kind, names)

    def first(self, choices: Sequence[str]) -> str:
        """The name of these that it has; empty for none."""
        return next((name for name in choices if name in self.names), "")

    def reporting(self, pipeline: Any, progress: ReportProgress) -> dict[str, Callable]:
        """The argument that has each step told of, where the job may be cancelled."""

        def told(step: int) -> None:
            progress(SAMPLING, step + 1, len(pipeline.scheduler.timesteps))

        def at_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            told(step)
            return tensors

        name = self.first(REPORTS)
        return {name: at_end if name == REPORTS[0] else lambda step, timestep, latents: told(step)}


@dataclass(frozen=True)
class Taken:
    """What a latent asks for: so many items of a size in pixels, of `frames` frames that are `steps` in the latent; 0 for
    pictures.
    """

    batch: int
    height: int
    width: int
    frames: int
    steps: int

    @classmethod
    def by(cls, pipeline: Any, vae: nn.Module, request: Sample) -> Taken:
        """Raises `Refused` for a latent with something in it."""
        latent = request.latent
        if latent.any():
            raise Refused("the latent is not empty, but this pipeline begins from noise alone: connect an empty latent")
        spatial = request.downscale[0] or _scale(pipeline, SPATIAL)
        channels = getattr(vae.config, "latent_channels", None) or getattr(vae.config, "z_dim", None)
        if request.downscale[0] is None and channels and channels != latent.shape[1]:
            spatial = EMPTY_SPATIAL
        steps = latent.shape[2] if latent.ndim == 5 else 1
        own = _scale(pipeline, TEMPORAL, default=1)
        frames = (steps - 1) * (request.downscale[1] or own) + 1
        height, width = (side * spatial for side in latent.shape[-2:])
        return cls(len(latent), height, width, frames, (frames - 1) // own + 1)


def _scale(pipeline: Any, names: Sequence[str], default: int = EMPTY_SPATIAL) -> int:
    return next((int(getattr(pipeline, name)) for name in names if getattr(pipeline, name, None)), default)


def check_request(request: Sample, found: OwnPipeline) -> None:
    """Raise `Refused`, with its name, for what a pipeline of diffusers' own does not take from a Sampler."""
    check_settings(request.settings, found)
    for name, title in INPUTS.items():
        if getattr(request, name) is not None and getattr(request, name) != ():
            raise Refused(f"{title}: {found.kind} takes none: remove it, or choose a model with a family of its own")


def check_settings(settings: SampleSettings, found: OwnPipeline) -> None:
    """Raise `Refused` for the first widget that it does not take at this value."""
    default = SampleSettings()
    for name in SampleSettings.model_fields:
        value, own = getattr(settings, name), getattr(default, name)
        if name not in FREE and value != own:
            raise Refused(f"{name} {value}: {found.kind} samples with its own scheduler: leave it at {own}")


def arguments_of(request: Sample, taken: Taken, way: Way) -> dict[str, Any]:
    """The arguments for a request. Raises `Refused` for what the pipeline has no argument for."""
    settings, names = request.settings, way.names
    positive = _prompt(request.positive, "positive", way)
    arguments: dict[str, Any] = {
        "prompt": _text(positive, "positive"),
        "num_inference_steps": settings.steps,
        "generator": torch.Generator("cpu").manual_seed(settings.seed),
        "height": taken.height,
        "width": taken.width,
        "output_type": "pt",
    }
    if "use_resolution_binning" in names:
        arguments["use_resolution_binning"] = False  # the size is the latent's
    return arguments | _counts(taken, way) | _guidance(request, positive.guidance, way)


def _counts(taken: Taken, way: Way) -> dict[str, int]:
    """How many items, and of how many frames."""
    batch, frames = way.first(BATCHES), way.first(FRAMES)
    if taken.batch > 1 and not batch:
        raise Refused(f"the latent has {taken.batch} items, but {way.kind} makes one at a time: set the batch to 1")
    if taken.frames > 1 and not frames:
        raise Refused(f"the latent has {taken.frames} frames, but {way.kind} makes pictures: connect a latent of one")
    counts = {batch: taken.batch, frames: taken.frames, CHUNK: taken.batch * taken.frames}
    return {name: count for name, count in counts.items() if name in way.names}


def _guidance(request: Sample, embedded: float | None, way: Way) -> dict[str, Any]:
    """cfg and the negative prompt; `embedded` is the guidance that distilled models are told, where there is room for it."""
    cfg, names = request.settings.cfg, way.names
    if cfg < 1.0:
        raise Refused(f"cfg {cfg:g}: {way.kind} takes 1 or more, where 1 is without a negative prompt")
    arguments: dict[str, Any] = {"true_cfg_scale" if "true_cfg_scale" in names else "guidance_scale": cfg}
    if embedded is not None:
        if not {"true_cfg_scale", "guidance_scale"} <= names:
            raise Refused(f"positive: {way.kind} is told no guidance beside cfg: remove Flux Guidance")
        arguments["guidance_scale"] = embedded
    if request.negative and cfg > 1.0:
        text = _text(_prompt(request.negative, "negative", way), "negative")
        if "negative_prompt" in names:
            arguments["negative_prompt"] = text
        elif text:
            raise Refused(f"negative: {way.kind} takes no negative prompt: disconnect it, or set cfg to 1")
    return arguments


def _prompt(entries: Sequence[Conditioning], what: str, way: Way) -> Conditioning:
    """The one entry of a side. Raises `Refused` for several, and for what nodes have put beside the text."""
    if len(entries) != 1:
        raise Refused(
            f"{what}: {way.kind} takes one prompt, and this CONDITIONING has {len(entries)}: combine no prompts"
        )
    [entry] = entries
    for name, field in Conditioning.model_fields.items():
        if name == "embedding" or (name == "guidance" and what == "positive"):
            continue
        value, default = getattr(entry, name), field.get_default(call_default_factory=True)
        if isinstance(value, torch.Tensor) or value != default:
            raise Refused(
                f"{what}: {way.kind} takes a text alone, and this CONDITIONING has {name}: remove what adds it"
            )
    return entry


def _text(entry: Conditioning, what: str) -> str:
    text = text_of(entry.embedding)
    if text is None:
        raise Refused(
            f"{what}: this model encodes its prompt itself: connect Outrigger Text Encode with it, and nothing in between"
        )
    return text


def check_latent(latent: torch.Tensor, taken: Taken, found: OwnPipeline) -> None:
    """Raise `Refused` where a pipeline gave its VAE something else than was asked for: a part of it, or another size."""
    steps = latent.shape[2] if latent.ndim == 5 else 1
    if latent.ndim == 4 and len(latent) == taken.batch * taken.frames:
        latent, steps = latent[: taken.batch], taken.steps  # each frame as a picture
    alike = latent.shape[-2] * taken.width == latent.shape[-1] * taken.height
    if latent.ndim not in (4, 5) or len(latent) != taken.batch or steps != taken.steps or not alike:
        raise Refused(
            f"{found.kind} made a latent of {tuple(latent.shape)} where {taken.batch} of {taken.width} x {taken.height} pixels "
            f"and {taken.frames} frame{'s'[: taken.frames != 1]} were asked for: choose another size, or one item at a time"
        )
