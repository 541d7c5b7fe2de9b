"""Prompt to picture or video, without ComfyUI, for models whose text encoder and VAE are read."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..families.spec import LatentFormat
from ..inspection import inspect_model
from ..machine import Machine
from ..needs import USUAL_BRANCHES
from ..parts import text_parts_of, vae_of
from ..plan import Plan, plan_model
from ..settings import FROM_MODEL, ModelSettings, SampleSettings
from ..without_spec import OwnPipeline, pipeline_without_spec
from ..workload import Workload
from .flags import add_model_flags, add_output_flags, model_settings
from .models import TEXT_ENCODER_FOLDERS, VAE_FOLDERS, find_part
from .output import show
from .sampler import add_sampling_flags, sample_settings
from .sidecar import own_sidecar
from .sizes import latent_shape, size_of

STEPS = 20
PARTS = {
    "text_encoder": TEXT_ENCODER_FOLDERS,
    "text_encoder_2": TEXT_ENCODER_FOLDERS,
    "text_encoder_3": TEXT_ENCODER_FOLDERS,
    "vae": VAE_FOLDERS,
}
PIXELS = LatentFormat(channels=4, dims=2, spatial=8, temporal=1, mean=(), std=(), rgb=(), rgb_bias=(0.0, 0.0, 0.0))
"""Of an empty latent that stands for a size alone: a place for 8 x 8 pixels of a frame."""

log = logging.getLogger("outrigger")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to draw, with what, and where to put it."""
    add_model_flags(parser)
    for part in PARTS:
        parser.add_argument(
            f"--{part.replace('_', '-')}", default=FROM_MODEL, help="path or name; else the model's own"
        )
    parser.add_argument("--prompt", required=True, help="what to draw; it is never logged")
    parser.add_argument("--negative", default="", help="what not to draw")
    parser.add_argument("--out", required=True, metavar="FILE", help="F.png for a picture, F.mp4 for a video")
    add_sampling_flags(parser, steps=STEPS)
    add_output_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Draw it, and say where it is and what took how long."""
    parts = {part: find_part(getattr(chosen, part), folders) for part, folders in PARTS.items()}
    model, settings, size = model_settings(chosen, **parts), sample_settings(chosen), size_of(chosen)
    out, found = Path(chosen.out), pipeline_without_spec(model.model)
    from .pictures import check_path, write  # torch: not before it is needed

    plan, empty = _of_family(model, settings, size) if found is None else _alone(found, model, settings, size)
    check_path(out, frames=size["frames"])
    seconds: dict[str, float] = {}
    with _timed(seconds, "total"), own_sidecar() as asker:
        with _timed(seconds, "load"):
            positive = asker.encode(model, chosen.prompt)
        seconds["load"] -= positive.seconds
        negative = asker.encode(model, chosen.negative) if settings.needs_negative else None
        entries = {"positive": (positive.conditioning,), "negative": (negative.conditioning,) if negative else ()}
        sampled = asker.sample(model, settings=settings, **empty, **entries)
        decoded = asker.decode(model, sampled.latent)
        memory = asker.memory()
        with _timed(seconds, "write"):
            write(decoded.images, out)
    seconds |= {
        "encode": positive.seconds + (negative.seconds if negative else 0.0),
        "sample": sampled.seconds,
        "decode": decoded.seconds,
    }
    answer = {"path": str(out.absolute()), "seconds": seconds, "seed": settings.seed}
    answer |= {"plan": plan.degrees, "memory": memory}
    show(answer, lambda it: f"{it['path']}: sampled in {sampled.seconds:.2f} s, {plan.reason}", as_json=chosen.json)
    return 0


def _of_family(model: ModelSettings, settings: SampleSettings, size: dict[str, int]) -> tuple[Plan, dict[str, Any]]:
    """The plan, and the empty latent as fields of a request. Raises `Refused` for what is missing or of another kind now, not
    after all steps.
    """
    facts = inspect_model(model.model)
    form, branches = facts.spec.latent, USUAL_BRANCHES if settings.needs_negative else 1
    plan = plan_model(model, Machine.here(), workload=Workload(latent_shape(form, **size), branches=branches))
    from ..encoders.vae_files import check_autoencoder  # torch
    from .inputs import empty_latent

    text_parts_of(model, facts)
    check_autoencoder(vae_of(model, facts), facts.spec)
    return plan, {"latent": empty_latent(form, **size)}


def _alone(
    found: OwnPipeline, model: ModelSettings, settings: SampleSettings, size: dict[str, int]
) -> tuple[Plan, dict[str, Any]]:
    """The same for a pipeline of diffusers' own, which brings all its parts."""
    plan = plan_model(model, Machine.here())
    from ..own_call import check_settings  # torch
    from ..own_pipeline import class_of
    from .inputs import empty_latent

    class_of(found)
    check_settings(settings, found)
    form = replace(PIXELS, dims=3) if size["frames"] > 1 else PIXELS
    return plan, {"latent": empty_latent(form, **size), "downscale": (form.spatial, form.temporal)}


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started
