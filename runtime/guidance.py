"""Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598), its branches on one rank or over an axis of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .parallel.shares import even_lengths, span
from .parallel.ulysses import gather_tokens
from .protocol import Conditioning
from .regions import Box, box_of, weight_of
from .workload import MOST_JOINED, count_branches

Predict = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]
NO_WEIGHT = 1e-37
"""What a place that no entry covers is divided by; ComfyUI's number."""


@dataclass(frozen=True)
class Entry:
    """A conditioning, and where and when it counts.

    It is used from sigma `start` down to sigma `end`; None sets no limit. `weight` broadcasts with the part of the latent
    that `box` covers; None for both is all of the latent, with weight 1. A `default` entry gets the weight that the
    others of its branch leave over.
    """

    conditioning: Conditioning
    box: Box | None = None
    weight: torch.Tensor | None = None
    start: float | None = None
    end: float | None = None
    default: bool = False

    @classmethod
    def of(cls, conditioning: Conditioning, x: torch.Tensor, *, percent_to_sigma: Callable[[float], float]) -> Entry:
        """The entry of a conditioning whose region is resolved, for latents like `x`."""
        start, end = (
            None if percent is None else percent_to_sigma(percent)
            for percent in (conditioning.start_percent, conditioning.end_percent)
        )
        box, weight = box_of(conditioning.area, x.shape), None
        if box is not None or conditioning.mask is not None or conditioning.strength != 1.0:
            weight = weight_of(conditioning, box, x)
        return cls(_cropped(conditioning, box), box, weight, start, end, conditioning.default)

    @property
    def shape(self) -> tuple:
        """Entries of one shape can go through the model together."""
        named = ((name, tensor.shape) for name, tensor in self.conditioning.tensors().items())
        sizes = [(part.start, part.stop) for part in self.box or ()]
        return (
            self.conditioning.guidance,
            self.conditioning.frame_rate,
            self.conditioning.reference_method,
            *named,
            *(stop - start for start, stop in sizes[2:]),
        )

    def is_used(self, sigma: torch.Tensor) -> bool:
        """Whether the entry counts at this sigma."""
        return not (self.start is not None and sigma > self.start) and not (self.end is not None and sigma < self.end)

    def is_ending(self, sigma: torch.Tensor) -> bool:
        """Whether this is the last sigma at which the entry can count."""
        return self.end is not None and bool(sigma == self.end)

    def part_of(self, x: torch.Tensor) -> torch.Tensor:
        """The part of a latent that the entry covers."""
        return x if self.box is None else x[self.box]


class Denoiser:
    """`(x, sigma) -> denoised` with guidance, for `x` of `batch` items; every rank of the axis gets the same result.

    `branches` go from the prompt that is wanted to the one that is not (positive, negative; or positive, middle, negative,
    as in ComfyUI's DualCFGGuider). `scales` has one number for each but the last: how far it is moved away from the next.
    With `perpendicular` there are three, and the middle one is moved away from what the last has of its own (Perp-Neg).
    A branch is one entry, or several whose predictions are averaged by weight. The last may be empty; then, and with a
    scale before it that leaves it without effect, it is left out, and so on. `keep_last` is for samplers that ask for the
    last one in any case.
    The ranks of a `group` share the branches, so that prompts and entries may differ in length and number; with a single
    branch all of them evaluate that one.
    """

    def __init__(
        self,
        predict: Predict,
        branches: Sequence[Sequence[Entry]],
        *,
        scales: Sequence[float],
        batch: int,
        group: dist.ProcessGroup | None = None,
        keep_last: bool = False,
        perpendicular: bool = False,
    ) -> None:
        count = count_branches(branches, scales, keep_last=keep_last, perpendicular=perpendicular)
        self._guide = _guided_away if perpendicular and count == 3 else _guided
        branches, self._scales = branches[:count], scales[: count - 1]
        self._predict, self._group = predict, group if count > 1 else None
        if self._group is not None:
            self._lengths = even_lengths(count, dist.get_world_size(group))
            branches = branches[span(self._lengths, dist.get_rank(group))]
        self._branches = [
            [replace(entry, conditioning=repeat_to_batch(entry.conditioning, batch)) for entry in branch]
            for branch in branches
        ]
        self._used: tuple[tuple[bool, bool], ...] = ()
        self._planned: list[_Call] = []

    @property
    def uses_group(self) -> bool:
        """Whether the ranks of the group evaluate different branches. When not, they are free for something else."""
        return self._group is not None

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The guided prediction at `sigma`."""
        return self.both(x, sigma)[0]

    def both(self, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The guided prediction and that of the last branch; where there is one branch it stands for both."""
        predicted = self._gathered(self._predicted(x, sigma), x)
        return self._guide(predicted, self._scales), predicted[-1]

    def _gathered(self, predicted: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        """The prediction of every branch."""
        if self._group is None:
            return predicted
        local = torch.stack(predicted) if predicted else x.new_empty(0, *x.shape)
        return list(gather_tokens(local, lengths=self._lengths, group=self._group, dim=0))

    def _predicted(self, x: torch.Tensor, sigma: torch.Tensor) -> list[torch.Tensor]:
        """The prediction of each branch that this rank evaluates."""
        found: list[list[tuple[Entry, torch.Tensor]]] = [[] for _ in self._branches]
        for call in self._calls(x, sigma):
            parts = torch.cat([entry.part_of(x) for _, entry in call.entries])
            outputs = self._predict(parts, sigma, call.conditioning).chunk(len(call.entries))
            for (branch, entry), output in zip(call.entries, outputs, strict=True):
                found[branch].append((entry, output))
        return [_mean(each, x) for each in found]

    def _calls(self, x: torch.Tensor, sigma: torch.Tensor) -> list[_Call]:
        """The calls of the model at `sigma`, worked out again where other entries are in use than the last time.

        Entries that end here have calls of their own, so that a step at which others begin takes no more memory.
        """
        used = tuple((entry.is_used(sigma), entry.is_ending(sigma)) for branch in self._branches for entry in branch)
        if used != self._used:
            branches = [[entry for entry in branch if entry.is_used(sigma)] for branch in self._branches]
            listed = [
                (number, entry) for number, branch in enumerate(branches) for entry in branch if not entry.default
            ]
            for number, branch in enumerate(branches):
                listed += [(number, entry) for entry in _defaults(branch, x)]
            apart = ([each for each in listed if each[1].is_ending(sigma) is ends] for ends in (False, True))
            self._used, self._planned = used, [call for together in apart for call in _joined(together)]
        return self._planned


def _guided(predicted: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    """Each prediction moved away from the next, from the last one on."""
    guided = predicted[-1]
    for number in reversed(range(len(predicted) - 1)):
        guided = (predicted[number] - predicted[number + 1]).mul_(scales[number]).add_(guided)
    return guided


def _guided_away(predicted: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
    """Perp-Neg (Armandpour et al. 2023, arXiv:2304.04968) over the whole batch, as in ComfyUI's PerpNegGuider: of the
    negative direction only what is perpendicular to the positive one counts.
    """
    positive, empty, negative = predicted
    cfg, neg_scale = scales
    wanted, unwanted = positive - empty, negative - empty
    perpendicular = unwanted - (unwanted * wanted).sum() / wanted.norm() ** 2 * wanted
    return empty + cfg * (wanted - neg_scale * perpendicular)


def repeat_to_batch(conditioning: Conditioning, batch: int) -> Conditioning:
    """The conditioning for a batch: its items in turn, until there are enough."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        times = -(-batch // tensor.shape[0])
        return tensor.repeat(times, *(1,) * (tensor.ndim - 1))[:batch] if times > 1 else tensor[:batch]

    return conditioning.with_tensors({name: repeated(tensor) for name, tensor in conditioning.tensors().items()})


def _cropped(conditioning: Conditioning, box: Box | None) -> Conditioning:
    """The conditioning of a part of the latent."""
    if box is None:
        return conditioning
    spans = (box[0], *box[2:])
    levels = conditioning.noise_levels
    boxes = {"concat_latent": box}
    if levels is not None:
        boxes["noise_levels"] = tuple(
            span if size > 1 else slice(None) for span, size in zip(spans, levels.shape, strict=True)
        )
    parts = {name: tensor[boxes[name]] for name, tensor in conditioning.tensors().items() if name in boxes}
    return conditioning.model_copy(update=parts)


@dataclass(frozen=True)
class _Call:
    """One call of the model: entries of one shape, each with the number of its branch, and what they read, joined."""

    entries: Sequence[tuple[int, Entry]]
    conditioning: Conditioning


def _mean(found: Sequence[tuple[Entry, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """The mean of what entries predict for their parts of `x`, by weight; 0 where no entry counts."""
    if len(found) == 1 and found[0][0].weight is None:
        return found[0][1]
    total, weights = torch.zeros_like(x), torch.full_like(x[:, :1], NO_WEIGHT)
    for entry, output in found:
        weight = 1.0 if entry.weight is None else entry.weight
        entry.part_of(total).add_(output * weight)
        entry.part_of(weights).add_(weight)
    return total / weights


def _defaults(branch: Sequence[Entry], x: torch.Tensor) -> list[Entry]:
    """The default entries of a branch, with the weight that the others leave over; none where they leave nothing."""
    defaults = [entry for entry in branch if entry.default]
    if not defaults:
        return []
    left = torch.ones_like(x[:, :1])
    for entry in branch:
        if not entry.default:
            entry.part_of(left).sub_(1.0 if entry.weight is None else entry.weight)
    left.relu_()
    return [replace(entry, weight=left) for entry in defaults] if left.any() else []


def _joined(listed: list[tuple[int, Entry]]) -> list[_Call]:
    """The fewest calls for these entries; within a shape the last comes first, as ComfyUI adds them up."""
    shapes: dict[tuple, list[tuple[int, Entry]]] = {}
    for number, entry in listed:
        shapes.setdefault(entry.shape, []).insert(0, (number, entry))
    calls = []
    for alike in shapes.values():
        for first in range(0, len(alike), MOST_JOINED):
            entries = alike[first : first + MOST_JOINED]
            calls.append(_Call(entries, _concatenated([entry.conditioning for _, entry in entries])))
    return calls


def _concatenated(conditionings: Sequence[Conditioning]) -> Conditioning:
    listed = [conditioning.tensors() for conditioning in conditionings]
    return conditionings[0].with_tensors({name: torch.cat([each[name] for each in listed]) for name in listed[0]})
