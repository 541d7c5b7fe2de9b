"""The flags that say what is sampled: the size, and the widgets of the Sampler."""

from __future__ import annotations

import argparse

from ..settings import SAMPLER_NAMES, SCHEDULER_NAMES, SampleSettings
from .flags import checked
from .sizes import add_size_flags

DEFAULTS = SampleSettings()


def add_sampling_flags(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """How large a picture or video, and the widgets of the Sampler."""
    add_size_flags(parser)
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
