"""The flags that say what is sampled: the size, and the widgets of the Sampler."""

from __future__ import annotations

import argparse

from ..inspection import RANDOM
from ..settings import SAMPLER_NAMES, SCHEDULER_NAMES, TINY_SHAPES, SampleSettings
from .flags import checked

SMALL, USUAL = 128, 512
"""Width and height where none is given."""
DEFAULTS = SampleSettings()


def add_sampling_flags(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """How large a picture or video, and the widgets of the Sampler."""
    parser.add_argument("--width", type=int, default=0, help=f"pixels; {SMALL} for the small models, else {USUAL}")
    parser.add_argument("--height", type=int, default=0, help="the same")
    parser.add_argument("--frames", type=int, default=1, help="1 for a picture")
    parser.add_argument("--steps", type=int, default=steps, help=f"{steps} where it is not given")
    parser.add_argument("--cfg", type=float, default=DEFAULTS.cfg, help="guidance")
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed, help="of the noise")
    parser.add_argument(
        "--sampler", choices=SAMPLER_NAMES, default=DEFAULTS.sampler_name, metavar="NAME", help="KSampler's names"
    )
    parser.add_argument("--scheduler", choices=SCHEDULER_NAMES, default=DEFAULTS.scheduler, help="KSampler's names")


def sample_settings(chosen: argparse.Namespace) -> SampleSettings:
    """The Sampler's widgets. Raises `Refused` in the user's words."""
    return checked(
        SampleSettings,
        seed=chosen.seed,
        steps=chosen.steps,
        cfg=chosen.cfg,
        sampler_name=chosen.sampler,
        scheduler=chosen.scheduler,
    )


def size_of(chosen: argparse.Namespace) -> dict[str, int]:
    """Width, height and frames."""
    usual = SMALL if chosen.model == TINY_SHAPES or chosen.model.startswith(RANDOM) else USUAL
    return {"width": chosen.width or usual, "height": chosen.height or usual, "frames": chosen.frames}
