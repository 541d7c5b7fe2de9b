"""The tensors that a file has for a layer -> the change they make together."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .changes import Change, Decomposed, Difference, Hadamard, Kronecker, LowRank, Value

Tensors = Mapping[str, torch.Tensor]
"""The tensors of a layer, by role."""


def weight_change(tensors: Tensors) -> Change | None:
    """What is done to the weight of a layer; None for nothing. What a full difference stands beside is left, as in ComfyUI.

    Raises `ValueError` when a part is missing, has numbers that are not finite, or does not fit the others.
    """
    for role, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise ValueError(f"{role} has numbers that are not finite")
    if "value" in tensors:
        return Value(tensors["value"])
    if "difference" in tensors:
        return Difference(tensors["difference"])
    product = _product(tensors)
    if product is None or not {"magnitude", "magnitude_of_sum"} & tensors.keys():
        return product
    of_sum = "magnitude" not in tensors
    return Decomposed(product, tensors["magnitude_of_sum" if of_sum else "magnitude"], of_sum=of_sum)


def _product(tensors: Tensors) -> Change | None:
    if {"down", "up"} & tensors.keys():
        down, up = _both(tensors, "down", "up")
        return LowRank(down, up, _scale(tensors, len(down)))
    if any(role.startswith("hada_") for role in tensors):
        (a1, b1), (a2, b2) = (_both(tensors, f"hada_w{n}_a", f"hada_w{n}_b") for n in (1, 2))
        return Hadamard(LowRank(b1, a1, _scale(tensors, len(b1))), LowRank(b2, a2, 1.0))
    if any(role.startswith("lokr_") for role in tensors):
        first, second = (_factor(tensors, f"lokr_w{n}") for n in (1, 2))
        ranks = [len(factor.down) for factor in (second, first) if isinstance(factor, LowRank)]
        return Kronecker(first, second, _scale(tensors, ranks[0]) if ranks else 1.0)
    return None


def _factor(tensors: Tensors, role: str) -> torch.Tensor | LowRank:
    if role in tensors:
        return _matrix(tensors, role)
    up, down = _both(tensors, f"{role}_a", f"{role}_b")
    return LowRank(down, up, 1.0)


def _both(tensors: Tensors, *roles: str) -> list[torch.Tensor]:
    missing = [role for role in roles if role not in tensors]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    return [_matrix(tensors, role) for role in roles]


def _matrix(tensors: Tensors, role: str) -> torch.Tensor:
    """A tensor that has to be a matrix, or one with the kernel of a convolution behind."""
    tensor = tensors[role]
    if tensor.ndim < 2 or not tensor.numel():
        raise ValueError(f"{role} has shape {tuple(tensor.shape)}, which is no matrix")
    return tensor


def _scale(tensors: Tensors, rank: int) -> float:
    """alpha / rank; without an alpha it is the rank."""
    return float(tensors["alpha"]) / rank if "alpha" in tensors else 1.0
