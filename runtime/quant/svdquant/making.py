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
EXACT_WIDTH, OVERSAMPLING, ITERATIONS = 512, 16, 4


@dataclass(frozen=True)
class Rounded:
    """A weight `(N, K)` in 4 bits: `values` that codes can stand for, `(N, K)`, `scales` of the groups, `(N, K / group)`,
    and `tensor_scale` of the whole, which is 1 but for floats.
    """

    values: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """What it stands for."""
        groups = self.values.unflatten(1, (self.scales.shape[1], -1))
        return (groups * (self.scales * self.tensor_scale)[..., None]).flatten(1)


def on_load_rank(n: int, k: int) -> int:
    """The rank of a Linear that is made without calibration: as much of 32 as it has."""
    return min(ON_LOAD_RANK, min(n, k) // FRAGMENT * FRAGMENT)


def round_weight(weight: torch.Tensor, form: Format, *, shrinks: Sequence[float] = SHRINKS) -> Rounded:
    """To the nearest codes, with the scales of which the squared error is least. `weight` is float32.

    Some rows at a time, which takes less memory, and less time.
    """
    tensor_scale = weight.new_ones(())
    if form.is_float:
        largest = torch.maximum(weight.max(), -weight.min())
        tensor_scale = (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    rows = weight.split(max(1, AT_ONCE // weight.shape[1]))
    values, scales = zip(*(_round_rows(each, form, tensor_scale, shrinks) for each in rows), strict=True)
    return Rounded(torch.cat(values), torch.cat(scales), tensor_scale)


def _round_rows(
    weight: torch.Tensor, form: Format, tensor_scale: torch.Tensor, shrinks: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of rows."""
    groups = weight.unflatten(1, (-1, form.group))
    largest = groups.abs().amax(-1, keepdim=True)
    best = best_error = None
    for shrink in shrinks:
        scales = stored_scales(largest * shrink / tensor_scale, form)
        step = (scales * tensor_scale).where(scales > 0, 1)
        values = round_to_codes(groups / step, form)
        error = (values * step - groups).square().sum(-1, keepdim=True)
        if best is None:
            best, best_error = (values, scales), error
        else:
            better = error < best_error
            best = tuple(new.where(better, old) for new, old in zip((values, scales), best, strict=True))
            best_error = error.minimum(best_error)
    return best[0].flatten(1), best[1].squeeze(-1)


def stored_scales(largest: torch.Tensor, form: Format) -> torch.Tensor:
    """The scale for groups with these largest numbers, as exact as a file stores it."""
    if form.is_float:
        return round_e4m3(largest / E2M1_MAX)
    return (largest / INT4_MAX).to(form.scale_dtype).float()


def round_nearest(weight: torch.Tensor, form: Format) -> Rounded:
    """To the nearest codes, with the largest number of each group as it is."""
    return round_weight(weight, form, shrinks=SHRINKS[:1])


def low_rank(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest matrix of that rank (Eckart & Young 1936), as `up (N, rank)` and `down (rank, K)`.

    Of a large weight nearly that, by iteration on a random subspace (Halko et al. 2011, arXiv:0909.4061).
    """
    if min(weight.shape) <= EXACT_WIDTH:
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        basis = torch.randn(weight.shape[1], rank + OVERSAMPLING, generator=torch.Generator().manual_seed(0)).to(weight)
        for _ in range(ITERATIONS):
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
