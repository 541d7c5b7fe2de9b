"""A Linear in 4 bits with a low-rank branch, in plain torch: it runs on any device, and says what a kernel must give."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.shares import WHOLE, Cut
from ...stored import TENSOR_SCALE, Stored
from ...temporaries import AT_ONCE
from ..core import Core
from .formats import FORMATS, SHIFT, code_values, round_activations
from .making import on_load_rank, pack_on_load
from .packing import TILE_N, grown, padded
from .tensors import PackedCut, Packing, PlainCut, Spans, every

HELD = ("qweight", "wscales", "proj_up", "proj_down", "smooth_factor")
CHANNEL_SCALES = "wcscales"
BIAS = "bias"
UNUSED = ("smooth_factor_orig",)
"""In a file for whoever wants to quantise it once more."""


class SVDQuantCore(Core):
    """`y = Q(x / smooth) W^T + (x down^T) up^T`: Q rounds each token in groups of features, W has codes and scales, and the
    low-rank branch sees `x` itself. The tensors stay packed; W is unpacked for each call.
    """

    def __init__(self, linear: nn.Linear, cut: Cut, stored: Stored) -> None:
        super().__init__(linear, cut, stored)
        self.form = FORMATS[stored.kind]
        shapes = stored.shapes
        rank = shapes["proj_down"][1] if shapes else on_load_rank(linear.out_features, linear.in_features)
        fused = shapes["qweight"][0] if stored.rows else linear.out_features
        self._full = Packing(fused, linear.in_features, rank, self.form)
        self._rows, self._columns = _spans(linear, cut, stored)
        self._local = self._part("qweight").local
        for leaf in self._held():
            held = torch.empty(self._local.shape(leaf), dtype=self._dtype(leaf, linear), device="meta")
            self.register_parameter(leaf, nn.Parameter(held, requires_grad=False))

    def part(self, leaf: str) -> Cut | PackedCut | PlainCut | None:
        if leaf in UNUSED:
            return None
        if not self.stored.shapes:
            return WHOLE if leaf == "weight" else super().part(leaf)
        return PlainCut(BIAS, self._full, self._rows) if leaf == BIAS else self._part(leaf)

    def place(self, leaf: str, tensor: torch.Tensor) -> None:
        if leaf == "weight":
            for made, packed in pack_on_load(tensor, self._full).items():
                super().place(made, self._part(made).take(packed))
        else:
            super().place(leaf, tensor.float() if leaf == TENSOR_SCALE else tensor)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        rounded = round_activations(self._smoothed(x), self.form).to(x.dtype)
        output = F.linear(F.linear(x, self._plain("proj_down", x)), self._plain("proj_up", x), bias)
        return output.add_(F.linear(rounded, self.weight(x)))

    def _smoothed(self, x: torch.Tensor) -> torch.Tensor:
        """The input as it is rounded, `(..., padded in)` in float32."""
        smooth = self._plain("smooth_factor", x).float()
        smoothed = (x.float() + SHIFT).div_(smooth) if self.form.unsigned else x / smooth
        return grown(smoothed, (*x.shape[:-1], padded(self._local.k)))

    def matrix(self) -> torch.Tensor:
        """What all of it stands for where activations are not rounded: the codes without the smoothing, and the branch."""
        like = torch.empty((), device=self.qweight.device)
        smooth, down, up = (self._plain(leaf, like) for leaf in ("smooth_factor", "proj_down", "proj_up"))
        return self.weight(like)[:, : self._local.k] / smooth + up @ down

    def weight(self, like: torch.Tensor) -> torch.Tensor:
        """What codes and scales stand for, `(N, padded K)`, in the dtype of a tensor. Some tiles of rows at a time: so little
        lies beside it.
        """
        numbers = {leaf: self._local.layout(leaf).unpack(getattr(self, leaf)).float() for leaf in self._scales()}
        steps = numbers.pop("wscales")[..., None]
        weight = like.new_empty(len(steps), padded(self._local.k))
        rows = max(TILE_N, AT_ONCE // weight.shape[1] // TILE_N * TILE_N)
        for part in (slice(start, start + rows) for start in range(0, len(weight), rows)):
            weight[part] = self._values(part, steps, numbers.values())
        return weight[: self._local.n]

    def _values(self, rows: slice, steps: torch.Tensor, scales: Iterable[torch.Tensor]) -> torch.Tensor:
        """What the codes of whole tiles of rows stand for in these steps and scales, float32."""
        codes = self._local.layout("qweight").unpack(self.qweight[rows])
        values = code_values(codes, self.form).unflatten(-1, (-1, self.form.group)).mul_(steps[rows])
        for scale in scales:
            values.mul_(scale.expand(len(steps))[rows, None, None])
        return values.flatten(-2)

    def _scales(self) -> tuple[str, ...]:
        """What the codes are multiplied with, of that what is held."""
        return ("wscales", *(leaf for leaf in (CHANNEL_SCALES, TENSOR_SCALE) if leaf in self._parameters))

    def _plain(self, leaf: str, like: torch.Tensor) -> torch.Tensor:
        return self._local.plain(leaf, getattr(self, leaf)).to(like.dtype)

    def _part(self, leaf: str) -> PackedCut:
        return PackedCut(leaf, self._full, self._rows, self._columns)

    def _held(self) -> tuple[str, ...]:
        """The tensors of this Linear that are held: of scales of the whole weight or of its channels, those that a file has."""
        if not self.stored.shapes:
            return (*HELD, TENSOR_SCALE) if self.form.is_float else HELD
        return (*HELD, *(leaf for leaf in (CHANNEL_SCALES, TENSOR_SCALE) if leaf in self.stored.shapes))

    def _dtype(self, leaf: str, linear: nn.Linear) -> torch.dtype:
        by_leaf = {"qweight": torch.int8, "wscales": self.form.scale_dtype, TENSOR_SCALE: torch.float32}
        return by_leaf.get(leaf, linear.weight.dtype)


def _spans(linear: nn.Linear, cut: Cut, stored: Stored) -> tuple[Spans, Spans]:
    """The output and the input features of a cut, the former as they are numbered in the file."""
    rows = cut.spans if cut.spans and cut.dim == 0 else every(linear.out_features)
    columns = cut.spans if cut.spans and cut.dim == 1 else every(linear.in_features)
    first = stored.rows[0] if stored.rows else 0
    return tuple(slice(first + span.start, first + span.stop) for span in rows), columns
