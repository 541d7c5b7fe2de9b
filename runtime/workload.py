"""What a request asks of the ranks, known before a weight is read: plain numbers, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from .areas import Area, area_of_mask, area_of_percent, pair_areas, spans_of
from .families.spec import LatentFormat
from .message import Conditioning
from .parallel.lengths import even_lengths, span
from .protocol import Sample

MOST_JOINED = 4
"""Entries of guidance that go through the model together at most: more would only take memory."""


class Prompt(NamedTuple):
    """An entry of a branch of guidance: how many tokens its `text` has, the `area` it covers, None for all of the latent, and
    between which parts of the way it is used. `again`: it reads what another one of its branch has read. `references` are the
    shapes of those that stand beside the latent, `method` how, empty for the model's own choice.
    """

    text: int
    area: Area | None = None
    start: float = 0.0
    end: float = 1.0
    again: bool = False
    references: tuple[tuple[int, ...], ...] = ()
    method: str = ""

    @classmethod
    def of(cls, entry: Conditioning, *, again: bool = False) -> Prompt:
        """Of an entry whose area is in latent pixels."""
        start, end = (0.0 if entry.start_percent is None else entry.start_percent), entry.end_percent
        references = tuple(tuple(each.shape) for each in entry.references)
        end = 1.0 if end is None else end
        return cls(entry.text_tokens, entry.area, start, end, again, references, entry.reference_method)


class Call(NamedTuple):
    """So many entries that go through the model together, each of so many tokens of text, this part of the latent, and
    references of these shapes, which stand there by this `method`. The `others` that are used at that time cover so many pixels
    of the latent in all.
    """

    count: int
    others: int
    text: int
    dims: tuple[int, ...]
    references: tuple[tuple[int, ...], ...] = ()
    method: str = ""


@dataclass(frozen=True)
class Workload:
    """One step of sampling: the shape of the `latent`, `(B, C, H, W)` or `(B, C, F, H, W)`, and those of the most `references`
    beside it; the tokens of the longest prompt; and how many branches guidance evaluates. `downscale` as in `Sample`.
    `prompts` are the entries of those branches; where they are not known, one of the longest prompt for each. `masked`: a part
    of the latent is kept.
    """

    latent: tuple[int, ...]
    text: int = 0
    branches: int = 1
    references: tuple[tuple[int, ...], ...] = ()
    downscale: tuple[int | None, int | None] = (None, None)
    prompts: tuple[tuple[Prompt, ...], ...] = ()
    masked: bool = False

    @classmethod
    def of(cls, request: Sample) -> Workload:
        """That of a request, whose tensors may be references to tensors."""
        entries = [entry for branch in request.branches for entry in branch]
        settings, latent = request.settings, tuple(request.latent.shape)
        count = count_branches(
            request.branches,
            settings.scales,
            keep_last=settings.sampler_name.endswith("_cfg_pp"),
            perpendicular=settings.is_perpendicular,
        )
        paired = pair_areas(*([_in_pixels(entry, latent[2:]) for entry in branch] for branch in request.branches))
        return cls(
            latent=latent,
            text=max(entry.text_tokens for entry in entries),
            branches=count,
            prompts=tuple(
                tuple(Prompt.of(entry, again=number >= len(given)) for number, entry in enumerate(branch))
                for branch, given in zip(paired[:count], request.branches, strict=False)
            ),
            references=max((tuple(tuple(each.shape) for each in entry.references) for entry in entries), key=len),
            downscale=request.downscale,
            masked=request.noise_mask is not None,
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

    def tokens(self, patch: tuple[int, ...], *, call: Call | None = None) -> int:
        """How many tokens an item has, references among them; or what of it is in a call."""
        dims, references = (self.latent, self.references) if call is None else (call.dims, call.references)
        return sum(
            math.prod(-(-size // step) for size, step in zip(shape[-len(patch) :], patch, strict=True))
            for shape in (dims, *references)
        )

    def shares(self, cfg: int) -> list[list[Prompt]]:
        """The entries that each of `cfg` ranks evaluates: branches are dealt out, a single one is evaluated by all."""
        branches = self.prompts or ((Prompt(self.text, references=self.references),),) * self.branches
        lengths = even_lengths(len(branches), min(cfg, len(branches)))
        dealt = (branches[span(lengths, rank)] for rank in range(len(lengths)))
        return [[entry for branch in own for entry in branch] for own in dealt]

    def calls(self, entries: Sequence[Prompt], *, fill: int = 0) -> list[Call]:
        """The calls of the model for these entries, at all parts of the way, as `Denoiser` makes them. A family fills prompts
        up to so many tokens.
        """
        calls: set[Call] = set()
        for moment in {entry.start for entry in entries}:
            used = [entry for entry in entries if entry.start <= moment <= entry.end]
            apart = ((entry.end == moment, entry.area is None) for entry in used)
            shapes = (
                (max(entry.text, fill), self.dims_of(entry.area), entry.references, entry.method) for entry in used
            )
            alike = Counter(zip(apart, shapes, strict=True))
            pixels = sum(count * math.prod(shape[1]) for (_, shape), count in alike.items())
            joined = ((min(count, MOST_JOINED), shape) for (_, shape), count in alike.items())
            calls |= {Call(count, pixels - count * math.prod(shape[1]), *shape) for count, shape in joined}
        return sorted(calls)

    def dims_of(self, area: Area | None) -> tuple[int, ...]:
        """The part of the latent that an area covers; all of it for one that does not fit, which the job will refuse."""
        dims = self.latent[2:]
        with suppress(ValueError):
            return dims if area is None else tuple(end - start for start, end in spans_of(area, dims))
        return dims


def _in_pixels(entry: Conditioning, dims: Sequence[int]) -> Conditioning:
    """An entry with its area in pixels of a latent of these dims; with none where a mask decides that nobody looked into."""
    if entry.area_from_mask:
        sizes = () if entry.mask is None else entry.mask.shape[-2:]
        is_known = entry.mask_spans is not None and len(sizes) == 2 and math.prod((*sizes, *dims)) > 0
        return entry.model_copy(update={"area": area_of_mask(entry.mask_spans, sizes, dims) if is_known else None})
    if entry.area_percent is None or len(entry.area_percent) > 2 * len(dims):
        return entry
    return entry.model_copy(update={"area": area_of_percent(entry.area_percent, dims)})


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
