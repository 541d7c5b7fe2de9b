"""The data axis: replicas of a model share the items of a batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .guidance import Predict
from .parallel.shares import even_lengths, span
from .parallel.ulysses import gather_tokens
from .protocol import Conditioning


class Replicas:
    """A `predict` in which each replica takes some items of the batch; every one gets the predictions of all.

    The rest of sampling sees the whole batch on every rank: noise is drawn for all items at once, and whatever a sampler
    measures over the batch is the same everywhere. What it costs is one gather of the prediction for each call.
    """

    def __init__(self, predict: Predict, group: dist.ProcessGroup) -> None:
        self._predict, self._group = predict, group
        self._rank, self._degree = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """`x` is `(B, ...)`, the conditioning of the same batch. A replica whose share is empty waits for the others."""
        lengths = even_lengths(x.shape[0], self._degree)
        items = span(lengths, self._rank)
        part = x[items]
        if lengths[self._rank]:
            part = self._predict(part, sigma, _items_of(conditioning, items))
        return gather_tokens(part, lengths=lengths, group=self._group, dim=0)


def _items_of(conditioning: Conditioning, items: slice) -> Conditioning:
    return conditioning.with_tensors({name: tensor[items] for name, tensor in conditioning.tensors().items()})
