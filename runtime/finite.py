"""Numbers that are not finite: a picture of them is black, so that they end a job, with where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from .agreement import first_told
from .errors import Refused
from .facts import ModelFacts
from .mesh import Mesh
from .protocol import Sample
from .quant.core import Core

SIDES = ("positive", "middle", "negative")
BY_SETTINGS = "no input and no weight is so: a lower cfg, weaker LoRAs or dtype fp32 may keep them finite"
OTHER_DTYPE = "set dtype to bf16 or fp32"
IN_HALF = f"no number of fp16 is above 65504: {OTHER_DTYPE}"


class Weights(NamedTuple):
    """A model that a file, or a folder, is called by; those that are `streamed` begin so, and are not here to be looked at."""

    name: str
    model: nn.Module
    streamed: tuple[str, ...] = ()

    @classmethod
    def of(cls, transformer: nn.Module, facts: ModelFacts, *, streamed: bool) -> Weights:
        """Those of a transformer, whose blocks may be streamed."""
        return cls(facts.name, transformer, facts.spec.blocks if streamed else ())


def check_latent(latent: torch.Tensor, *, mesh: Mesh, cause: Callable[[], str]) -> None:
    """Raise `Refused` on every rank where the latent of one of them is no longer numbers. All call it together.

    `cause` is then called on each for what is known there; empty where that is nothing.
    """
    if mesh.largest(int(not latent.isfinite().all())):
        raise not_finite(first_told(mesh.control, cause()))


def not_finite(cause: str) -> Refused:
    """The error for a latent that is no longer numbers, with what is known of why."""
    return Refused(
        f"sampling ended in numbers that are not finite (nan or inf), a black picture: {cause or BY_SETTINGS}"
    )


def cause_of(request: Sample, held: Iterable[Weights], *, dtype: torch.dtype) -> str:
    """Where numbers that are not finite come from, as far as this rank can tell, and what to do; empty for nowhere."""
    given = next((name for name, tensor in _given(request) if not tensor.isfinite().all()), "")
    if given:
        return f"{given} has such numbers already: look at the node that it comes from"
    return cause_in(held, dtype=dtype)


def cause_in(held: Iterable[Weights], *, dtype: torch.dtype) -> str:
    """Which weight is not finite, or may not be on the way, and what to do; empty for none."""
    return next(filter(None, (_cause_in(weights, dtype) for weights in held)), "")


def _cause_in(weights: Weights, dtype: torch.dtype) -> str:
    name = first_not_finite(weights)
    if dtype == torch.float16:
        return f"{name} of {weights.name} is so in fp16: {OTHER_DTYPE}, or download the file again" if name else IN_HALF
    if name:
        return f"{name} of {weights.name} is so: the file is damaged, download it again"
    return (
        f"the blocks of {weights.name} are streamed and were not looked at; else {BY_SETTINGS}"
        if weights.streamed
        else ""
    )


def first_not_finite(weights: Weights) -> str:
    """The name of the first weight that has numbers which are not finite; empty where there is none."""
    names = (name for name, tensor in _numbers(weights) if not tensor.isfinite().all())
    return next(names, "")


def _given(request: Sample) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a request, by the inputs that they come in at."""
    named = {"latent_image": request.latent, "noise": request.noise, "the noise mask": request.noise_mask}
    yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)
    for side in SIDES:
        for entry in getattr(request, side):
            yield from ((side, tensor) for tensor in entry.tensors().values())


def _numbers(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in weights.model.named_modules():
        if name.startswith(weights.streamed):
            continue
        if isinstance(module, Core):
            yield f"{name.removesuffix('.core')}.weight", module.matrix()
        else:
            yield from ((f"{name}.{leaf}", tensor) for leaf, tensor in module.named_parameters(recurse=False))
