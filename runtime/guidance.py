"""Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598), its branches on one rank or over an axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .parallel.collectives import all_gather
from .protocol import Conditioning

Predict = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]
Branch = Sequence[Conditioning]
TENSORS = ("embedding", "pooled", "attention_mask")


class Denoiser:
    """`(x, sigma) -> denoised` with guidance, for `x` of `batch` items; every rank of the axis gets the same result.

    A branch is one conditioning, or several whose predictions are averaged. `negative` may be empty; then, and at cfg 1,
    only the positive branch is evaluated; `keep_negative` is for samplers that ask for the negative one at cfg 1. With a `group` of two, its first rank takes the positive branch and its second
    the negative one, so that prompts may differ in length; without a negative branch both evaluate the positive one.
    """

    def __init__(
        self,
        predict: Predict,
        positive: Branch,
        negative: Branch,
        *,
        cfg: float,
        batch: int,
        group: dist.ProcessGroup | None = None,
        keep_negative: bool = False,
    ) -> None:
        self._predict, self._cfg = predict, cfg
        both = bool(negative) and (keep_negative or not math.isclose(cfg, 1.0))
        branches = [positive, negative] if both else [positive]
        self._group = group if len(branches) > 1 else None
        if self._group is not None:
            branches = [branches[dist.get_rank(group)]]
        self._sizes = [len(branch) for branch in branches]
        self._calls = _batched([repeat_to_batch(entry, batch) for branch in branches for entry in branch])

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The guided prediction at `sigma`."""
        return self.both(x, sigma)[0]

    def both(self, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The guided prediction and the negative one; without a negative branch the positive one stands for both."""
        predicted = self._branches(x, sigma)
        if self._group is not None:
            predicted = list(all_gather(predicted[0], self._group))
        if len(predicted) == 1:
            return predicted[0], predicted[0]
        positive, negative = predicted
        return negative + (positive - negative) * self._cfg, negative

    def _branches(self, x: torch.Tensor, sigma: torch.Tensor) -> list[torch.Tensor]:
        """The prediction of each branch that this rank evaluates."""
        entries = []
        for conditioning, count in self._calls:
            entries += self._predict(torch.cat([x] * count), sigma, conditioning).chunk(count)
        return [_mean([entries.pop(0) for _ in range(size)]) for size in self._sizes]


def repeat_to_batch(conditioning: Conditioning, batch: int) -> Conditioning:
    """The conditioning for a batch: its items in turn, until there are enough."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        times = -(-batch // tensor.shape[0])
        return tensor.repeat(times, *(1,) * (tensor.ndim - 1))[:batch] if times > 1 else tensor[:batch]

    return conditioning.model_copy(update={name: repeated(tensor) for name, tensor in _tensors(conditioning)})


def _batched(entries: list[Conditioning]) -> list[tuple[Conditioning, int]]:
    """What to call the model with, and how many entries that is: all at once when everything has the same shape."""
    if len({_shape(entry) for entry in entries}) > 1:
        return [(entry, 1) for entry in entries]
    joined = {name: torch.cat([getattr(entry, name) for entry in entries]) for name, _ in _tensors(entries[0])}
    return [(entries[0].model_copy(update=joined), len(entries))]


def _tensors(conditioning: Conditioning) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name in TENSORS if (tensor := getattr(conditioning, name)) is not None]


def _shape(conditioning: Conditioning) -> tuple:
    return (conditioning.guidance, *((name, tensor.shape) for name, tensor in _tensors(conditioning)))


def _mean(predictions: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(predictions).mean(0) if len(predictions) > 1 else predictions[0]
