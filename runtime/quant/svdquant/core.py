"""A Linear in 4 bits with a low-rank branch, in plain torch: it runs on any device, and says what a kernel must give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.shares import WHOLE, Cut
from ...stored import TENSOR_SCALE, Stored
from ..core import Core
from .formats import FORMATS, SHIFT, code_values, round_activations
from .making import on_load_rank, pack_on_load
from .packing import padded
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
        output = F.linear(F.linear(x, self._plain("proj_down", x)), self._plain("proj_up", x), bias)
        exact = x.float() + SHIFT if self.form.unsigned else x.float()
        smoothed = F.pad(exact / self._plain("smooth_factor", exact), (0, padded(self._local.k) - self._local.k))
        return output + F.linear(round_activations(smoothed, self.form).to(x.dtype), self.weight(x))

    def matrix(self) -> torch.Tensor:
        """What all of it stands for where activations are not rounded: the codes without the smoothing, and the branch."""
        like = torch.empty((), device=self.qweight.device)
        smooth, down, up = (self._plain(leaf, like) for leaf in ("smooth_factor", "proj_down", "proj_up"))
        return self.weight(like)[:, : self._local.k] / smooth + up @ down

    def weight(self, like: torch.Tensor) -> torch.Tensor:
        """What codes and scales stand for, `(N, padded K)`, in the dtype of a tensor."""
        codes, scales = (self._local.layout(leaf).unpack(getattr(self, leaf)) for leaf in ("qweight", "wscales"))
        values = code_values(codes, self.form).unflatten(-1, (-1, self.form.group)) * scales.float()[..., None]
        weight = values.flatten(-2)[: self._local.n]
        for leaf in {CHANNEL_SCALES, TENSOR_SCALE}.intersection(self._parameters):
            weight = weight * self._local.plain(leaf, getattr(self, leaf)).float()[:, None]
        return weight.to(like.dtype)

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
