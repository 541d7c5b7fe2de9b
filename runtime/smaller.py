"""What there is memory for where there is not for what was asked: the same on the same ranks, held in another way or smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from .degrees import Degrees
from .errors import Refused
from .families.spec import LatentFormat
from .needs import Needs
from .parts import check_offload
from .settings import AUTO, OFFLOAD_KINDS, MemorySettings

Latent = tuple[int, ...]
FEWER = ("1", "0")
"""Blocks that are fetched ahead."""


@dataclass(frozen=True)
class Smaller:
    """Weights kept as `offload` says, or a step of another `latent`, and either in words; nothing where neither fits."""

    words: str = ""
    offload: MemorySettings | None = None
    latent: Latent | None = None


def smaller_that_fits(needs: Needs, degrees: Degrees) -> Smaller:
    """What fits on ranks of these degrees: with blocks that wait elsewhere, else with as many items as can be, else with one of
    as many frames, else with a smaller picture of the same form.
    """
    for offload in _offloads(needs):
        if not replace(needs, offload=offload).lack(degrees):
            return Smaller(_changed(needs.offload, offload), offload=offload)
    for most, latent_of in _latents(needs):
        count = _largest(most, lambda count, latent_of=latent_of: _fits(needs, degrees, latent_of(count)))
        if count:
            latent = latent_of(count)
            return Smaller(_in_words(latent, needs.facts.spec.latent), latent=latent)
    return Smaller()


def _offloads(needs: Needs) -> Iterator[MemorySettings]:
    """The ways to keep blocks elsewhere that the model has, from the one that is asked for on; with fewer fetched ahead only
    where that is what it takes.
    """
    kinds = OFFLOAD_KINDS[max(1, OFFLOAD_KINDS.index(needs.offload.offload)) :]
    for prefetch in dict.fromkeys((needs.offload.prefetch, *FEWER)):
        for kind, resident in product(kinds, (AUTO, "0")):
            changes = {"offload": kind, "resident_blocks": resident, "prefetch": prefetch}
            offload = needs.offload.model_copy(update=changes)
            try:
                check_offload(needs.facts, offload)
            except Refused:
                continue
            yield offload


def _changed(asked: MemorySettings, offload: MemorySettings) -> str:
    """What to set otherwise than was asked, in words."""
    values = {name: getattr(offload, name) for name in ("offload", "resident_blocks", "prefetch")}
    changed = [f"{name} {value}" for name, value in values.items() if value != getattr(asked, name)]
    return f"{', '.join(changed[:-1])}{' and ' if changed[1:] else ''}{changed[-1]} (Configure Memory)"


def _latents(needs: Needs) -> Iterator[tuple[int, Callable[[int], Latent]]]:
    """The ways to make a step smaller: how many latents each has, and the latent of a number; larger ones come later."""
    if needs.workload is None:
        return
    step = needs.facts.spec.patch[-1]
    batch, channels, *frames, height, width = needs.workload.latent
    one = [1 for _ in frames]
    yield batch - 1, lambda count: (count, channels, *frames, height, width)
    if frames:
        yield frames[0] - 1, lambda count: (1, channels, count, height, width)
    longest = max(height, width) // step
    yield (
        longest - 1,
        lambda count: (
            1,
            channels,
            *one,
            *(max(1, side * count // longest // step) * step for side in (height, width)),
        ),
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 1 to `most` that fits, as all smaller ones do; 0 where none does."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _fits(needs: Needs, degrees: Degrees, latent: Latent) -> bool:
    smaller = replace(needs, workload=replace(needs.workload, latent=latent))
    return not smaller.lack(degrees) and not smaller.problem(vars(degrees))


def _in_words(latent: Latent, form: LatentFormat) -> str:
    batch, _, *frames, height, width = latent
    video = f" and {(frames[0] - 1) * form.temporal + 1} frames" if frames and frames[0] > 1 else ""
    return f"a batch of {batch} at {width * form.spatial} x {height * form.spatial} pixels{video}"
