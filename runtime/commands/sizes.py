"""How large a picture or video is: the flags, and the shape of its latent."""

from __future__ import annotations

import argparse

from ..errors import Refused
from ..families.spec import LatentFormat
from ..inspection import RANDOM
from ..settings import TINY_SHAPES

SMALL, USUAL = 128, 512
"""Width and height where none is given."""
MOST = 16384
"""Of pixels along a side, and of frames: ComfyUI's own bound."""


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Width, height and frames."""
    parser.add_argument("--width", type=int, default=0, help=f"pixels; {SMALL} for the small models, else {USUAL}")
    parser.add_argument("--height", type=int, default=0, help="the same")
    parser.add_argument("--frames", type=int, default=1, help="1 for a picture")


def size_of(chosen: argparse.Namespace) -> dict[str, int]:
    """Width, height and frames."""
    usual = SMALL if chosen.model == TINY_SHAPES or chosen.model.startswith(RANDOM) else USUAL
    return {"width": chosen.width or usual, "height": chosen.height or usual, "frames": chosen.frames}


def latent_shape(form: LatentFormat, *, width: int, height: int, frames: int, batch: int = 1) -> tuple[int, ...]:
    """The shape of the latent of a picture or video of this size. Raises `Refused` for a size that none has."""
    for name, size in (("width", width), ("height", height)):
        if size < form.spatial or size % form.spatial:
            raise Refused(f"{name} {size} is no multiple of {form.spatial}: set it to one, {form.spatial} or more")
    if batch < 1:
        raise Refused(f"batch is {batch}: set it to 1 or more")
    for name, size in (("width", width), ("height", height), ("frames", frames)):
        if size > MOST:
            raise Refused(f"{name} is {size}: set it to {MOST} or less")
    if form.dims == 2 and frames > 1:
        raise Refused(f"frames is {frames}, but this model makes pictures: set it to 1")
    if frames < 1 or (frames - 1) % form.temporal:
        raise Refused(f"frames is {frames}: set it to 1, or 1 more than a multiple of {form.temporal}")
    sizes = [] if form.dims == 2 else [(frames - 1) // form.temporal + 1]
    return (batch, form.channels, *sizes, height // form.spatial, width // form.spatial)
