"""4-bit Linears in Triton kernels: the same numbers as in plain torch, but for the order of sums."""

from __future__ import annotations

import torch
import triton

from ...stored import TENSOR_SCALE
from ..awq import AWQCore
from .core import CHANNEL_SCALES, SVDQuantCore
from .formats import SHIFT
from .packing import padded
from .triton_kernels import multiply_awq, multiply_floats, multiply_integers, round_inputs

ROWS = 16
"""Of inputs that a program rounds: as few as the tensor cores take, so that there are many programs."""
BLOCK_M, BLOCK_N = 64, 128
LEAST_RANK = 16


class TritonCore(SVDQuantCore):
    """`SVDQuantCore` in two kernels, which read the weights as they are packed."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        output = rows.new_empty(len(rows), self._local.n)
        if len(rows):
            with torch.cuda.device_of(rows):
                self._multiply(*self._rounded(rows), bias, output)
        return output.reshape(*x.shape[:-1], output.shape[1])

    def _rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs in 4 bits, the scales of their groups where those are apart, and their low rank."""
        k, form = padded(self._local.k), self.form
        codes = x.new_empty(len(x), k, dtype=x.dtype if form.is_float else torch.int8)
        scales = x.new_empty(len(x), k // form.group, dtype=torch.float32)
        low = x.new_empty(len(x), self._local.rank, dtype=torch.float32)
        round_inputs[(triton.cdiv(len(x), ROWS),)](
            x, self.smooth_factor, self.proj_down, codes, scales, low,
            *x.shape,
            K=k, GROUP=form.group, SHIFT=SHIFT if form.unsigned else 0.0, LARGEST=form.largest, FLOAT=form.is_float,
            BLOCK=ROWS, **self._ranks,
        )  # fmt: skip
        return codes, scales, low

    def _multiply(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        low: torch.Tensor,
        bias: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        grid = triton.cdiv(len(output), BLOCK_M), triton.cdiv(output.shape[1], BLOCK_N)
        words = self.qweight.view(torch.int32)
        sizes = {
            "K": codes.shape[1],
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "HAS_BIAS": bias is not None,
            **self._ranks,
        }
        if not self.form.is_float:
            multiply_integers[grid](
                codes, scales, low, words, self.wscales, self.proj_up, bias, output, *output.shape, **sizes
            )
            return
        tensor_scale, channel_scales = (self._parameters.get(leaf) for leaf in (TENSOR_SCALE, CHANNEL_SCALES))
        multiply_floats[grid](
            codes, low, words, self.wscales.view(torch.uint8), tensor_scale, channel_scales, self.proj_up, bias, output,
            *output.shape,
            HAS_TENSOR_SCALE=tensor_scale is not None, HAS_CHANNEL_SCALES=channel_scales is not None, **sizes,
        )  # fmt: skip

    @property
    def _ranks(self) -> dict[str, int]:
        rank = self._local.rank
        return {"RANKS": rank, "RANK_BLOCK": max(triton.next_power_of_2(rank), LEAST_RANK)}


class TritonAWQCore(AWQCore):
    """`AWQCore` in a kernel that widens the weight on its way to the product."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        output = rows.new_empty(len(rows), len(self.qweight))
        if len(rows):
            with torch.cuda.device_of(rows):
                grid = triton.cdiv(len(rows), ROWS), triton.cdiv(len(self.qweight), BLOCK_N)
                multiply_awq[grid](
                    rows, self.qweight, self.wscales, self.wzeros, bias, output,
                    *output.shape, self.wscales.shape[1],
                    K=rows.shape[1], HAS_BIAS=bias is not None, BLOCK_M=ROWS, BLOCK_N=BLOCK_N,
                )  # fmt: skip
        return output.reshape(*x.shape[:-1], output.shape[1])


SVDQUANT, AWQ = TritonCore, TritonAWQCore
