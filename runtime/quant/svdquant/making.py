"""A weight -> the tensors of a 4-bit Linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .formats import E2M1_MAX, E4M3_MAX, INT4_MAX, Format, round_e4m3, round_to_codes, value_codes
from .packing import FRAGMENT, grown, padded
from .tensors import Packing

ON_LOAD_RANK = 32
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""What the largest number of a group is tried to be cut to: cutting it rounds the others more finely."""
AT_ONCE = 1 << 18
"""Numbers that are rounded together: as many as the caches hold."""
EXACT_WIDTH, OVERSAMPLING = 512, 16
ITERATIONS, ITERATIONS_NEAR = 4, 1
"""Of the subspace: from a random one, and from one that is nearly right."""


@dataclass(frozen=True)
class Rounded:
    """A weight `(N, K)` in 4 bits: `values` that codes can stand for, `(N, K)`, `scales` of the groups, `(N, K / group)`,
    and `tensor_scale` of the whole, which is 1 but for floats. 16 bits hold the values exactly.
    """

    values: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """What it stands for, float32."""
        groups = self.values.unflatten(1, (self.scales.shape[1], -1))
        return (groups * (self.scales * self.tensor_scale)[..., None]).flatten(1)


def on_load_rank(n: int, k: int) -> int:
    """The rank of a Linear that is made without calibration: as much of 32 as it has."""
    return min(ON_LOAD_RANK, min(n, k) // FRAGMENT * FRAGMENT)


def tensor_scale_of(largest: torch.Tensor, form: Format) -> torch.Tensor:
    """What all scales of a weight with this largest number are multiplied with."""
    if not form.is_float:
        return largest.new_ones(())
    return (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)


def largest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The largest absolute number."""
    return torch.maximum(tensor.max(), -tensor.min())


def round_weight(
    weight: torch.Tensor,
    form: Format,
    *,
    shrinks: Sequence[float] = SHRINKS,
    tensor_scale: torch.Tensor | None = None,
) -> Rounded:
    """To the nearest codes, with the scales of which the squared error is least. `weight` is float32; of rows of a weight
    `tensor_scale` is that of the whole.

    Some rows at a time, which takes less memory, and less time.
    """
    if tensor_scale is None:
        tensor_scale = tensor_scale_of(largest_of(weight), form)
    rows = weight.split(max(1, AT_ONCE // weight.shape[1]))
    values, scales = zip(*(_round_rows(each, form, tensor_scale, shrinks) for each in rows), strict=True)
    return Rounded(torch.cat(values), torch.cat(scales), tensor_scale)


def _round_rows(
    weight: torch.Tensor, form: Format, tensor_scale: torch.Tensor, shrinks: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of rows."""
    groups = weight.unflatten(1, (-1, form.group))
    largest = groups.abs().amax(-1, keepdim=True) / tensor_scale
    best, *others = (stored_scales(largest * shrink, form) for shrink in shrinks)
    least = _error(groups, _steps(best, tensor_scale), form) if others else None
    for scales in others:
        error = _error(groups, _steps(scales, tensor_scale), form)
        best, least = scales.where(error < least, best), error.minimum(least)
    return round_to_codes(groups / _steps(best, tensor_scale), form).flatten(1), best.squeeze(-1)


def _steps(scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """What a code of 1 stands for in each group."""
    return (scales * tensor_scale).where(scales > 0, 1)


def _error(groups: torch.Tensor, steps: torch.Tensor, form: Format) -> torch.Tensor:
    """The squared error of each group in these steps."""
    values = round_to_codes(groups / steps, form)
    return values.mul_(steps).sub_(groups).square_().sum(-1, keepdim=True)


def stored_scales(largest: torch.Tensor, form: Format) -> torch.Tensor:
    """The scale for groups with these largest numbers, as exact as a file stores it."""
    if form.is_float:
        return round_e4m3(largest / E2M1_MAX)
    return (largest / INT4_MAX).to(form.scale_dtype).float()


def round_nearest(weight: torch.Tensor, form: Format, *, tensor_scale: torch.Tensor | None = None) -> Rounded:
    """To the nearest codes, with the largest number of each group as it is."""
    return round_weight(weight, form, shrinks=SHRINKS[:1], tensor_scale=tensor_scale)


def low_rank(weight: torch.Tensor, rank: int, *, near: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest matrix of that rank (Eckart & Young 1936), as `up (N, rank)` and `down (rank, K)`.

    Of a large weight nearly that, by iteration on a random subspace (Halko et al. 2011, arXiv:0909.4061), or from the rows
    of `near`, the `down` of a matrix that is nearly this one.
    """
    if min(weight.shape) <= EXACT_WIDTH:
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        drawn = rank + OVERSAMPLING if near is None else OVERSAMPLING
        basis = torch.randn(weight.shape[1], drawn, generator=torch.Generator().manual_seed(0)).to(weight)
        basis = basis if near is None else torch.cat([near.T, basis], dim=1)
        for _ in range(ITERATIONS if near is None else ITERATIONS_NEAR):
            basis = torch.linalg.qr(weight.T @ torch.linalg.qr(weight @ basis).Q).Q
        left, sizes, small = torch.linalg.svd(weight @ basis, full_matrices=False)
        right = small @ basis.T
    root = sizes[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]


def packed_linear(
    rounded: Rounded, up: torch.Tensor, down: torch.Tensor, smooth: torch.Tensor, packing: Packing, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors as a file has them; `down` is for the input before smoothing."""
    form = packing.form
    plain = {
        "qweight": value_codes(rounded.values, form),
        "wscales": rounded.scales.to(form.scale_dtype if form.is_float else dtype),
        "proj_up": up.to(dtype),
        "proj_down": down.to(dtype),
        "smooth_factor": smooth.to(dtype),
    }
    if form.is_float:
        plain["wtscale"] = rounded.tensor_scale.reshape(1).to(torch.float32)
    return {leaf: packing.packed(leaf, tensor) for leaf, tensor in plain.items()}


def pack_on_load(weight: torch.Tensor, packing: Packing) -> dict[str, torch.Tensor]:
    """A plain weight in 4 bits, without calibration: its low rank, and the rest rounded. In the dtype of the weight."""
    exact = weight.float()
    up, down = low_rank(exact, packing.rank)
    rounded = round_weight(grown(exact - up @ down, (packing.n, padded(packing.k))), packing.form)
    return packed_linear(rounded, up, down, exact.new_ones(packing.k), packing, weight.dtype)
