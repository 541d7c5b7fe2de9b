"""What a request asks of the ranks, known before a weight is read: plain numbers, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace

from .families.spec import LatentFormat
from .protocol import Sample


@dataclass(frozen=True)
class Workload:
    """One step of sampling: the shape of the `latent`, `(B, C, H, W)` or `(B, C, F, H, W)`, and those of the `references`
    beside it; the tokens of the longest prompt; and how many branches guidance evaluates. `downscale` as in `Sample`.
    """

    latent: tuple[int, ...]
    text: int = 0
    branches: int = 1
    references: tuple[tuple[int, ...], ...] = ()
    downscale: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(cls, request: Sample) -> Workload:
        """That of a request, whose tensors may be references to tensors."""
        entries = [entry for branch in request.branches for entry in branch]
        settings = request.settings
        return cls(
            latent=tuple(request.latent.shape),
            text=max(entry.text_tokens for entry in entries),
            branches=count_branches(
                request.branches,
                settings.scales,
                keep_last=settings.sampler_name.endswith("_cfg_pp"),
                perpendicular=settings.is_perpendicular,
            ),
            references=max((tuple(tuple(each.shape) for each in entry.references) for entry in entries), key=len),
            downscale=request.downscale,
        )

    def sampled_as(self, form: LatentFormat) -> Workload:
        """The same in the shape that the latent is sampled in, where that was made for another family: it is empty then."""
        batch, _, *frames, height, width = self.latent
        made_for = zip(self.downscale, (form.spatial, form.temporal), strict=True)
        spatial, temporal = ((other or own) / own for other, own in made_for)
        sizes = (round(height * spatial), round(width * spatial))
        if form.dims == 3:
            sizes = (max(1, round((frames[0] if frames else 1) * temporal)), *sizes)
        return replace(self, latent=(batch, form.channels, *sizes), downscale=(None, None))

    @property
    def batch(self) -> int:
        """How many pictures or videos."""
        return self.latent[0]

    def tokens(self, patch: tuple[int, ...]) -> int:
        """How many tokens an item has, references among them."""
        return sum(
            math.prod(-(-size // step) for size, step in zip(shape[-len(patch) :], patch, strict=True))
            for shape in (self.latent, *self.references)
        )


def count_branches(
    branches: Sequence[Sized], scales: Sequence[float], *, keep_last: bool, perpendicular: bool = False
) -> int:
    """How many branches, from the first, count for the guided prediction; arguments as in `Denoiser`."""
    without_effect = [1.0] * len(scales)
    if perpendicular:
        without_effect[-1] = 0.0
    count = len(branches) if branches[-1] else len(branches) - 1
    while count > 1 and not keep_last and math.isclose(scales[count - 2], without_effect[count - 2]):
        count -= 1
    return count
