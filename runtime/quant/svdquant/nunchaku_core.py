"""4-bit Linears in the kernels of the package nunchaku (github.com/nunchaku-tech/nunchaku, which is not on PyPI)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nunchaku.ops.gemm import svdq_gemm_w4a4_cuda
from nunchaku.ops.quantize import svdq_quantize_w4a4_act_fuse_lora_cuda

from ...stored import TENSOR_SCALE
from .core import CHANNEL_SCALES, SVDQuantCore
from .packing import padded

ROWS = 256
"""What the kernels want the number of tokens to be a multiple of; they fill it up themselves."""


class NunchakuCore(SVDQuantCore):
    """`SVDQuantCore` in the kernels that its tensors are packed for. For inputs in bf16 and fp16, and not for unsigned ones,
    which those kernels make nowhere but within an MLP of theirs.
    """

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(..., in)` -> `(..., out)`."""
        n, k = self._local.n, self._local.k
        rows = F.pad(x.reshape(-1, k), (0, padded(k) - k)).contiguous()
        output = rows.new_empty(len(rows), padded(n))
        if len(rows):
            self._multiply(rows, output)
        output = output[:, :n].reshape(*x.shape[:-1], n)
        return output if bias is None else output.add_(bias)

    def _multiply(self, x: torch.Tensor, output: torch.Tensor) -> None:
        is_float = self.form.is_float
        codes, scales, low = svdq_quantize_w4a4_act_fuse_lora_cuda(
            x, lora_down=self.proj_down, smooth=self.smooth_factor, fp4=is_float, pad_size=ROWS
        )
        svdq_gemm_w4a4_cuda(
            act=codes,
            wgt=self.qweight,
            out=output,
            ascales=scales,
            wscales=self.wscales,
            lora_act_in=low,
            lora_up=self.proj_up,
            fp4=is_float,
            alpha=1.0,
            wcscales=self._channel_scales(output) if is_float else None,
        )

    def _channel_scales(self, like: torch.Tensor) -> torch.Tensor:
        """The scales of the channels with that of the whole in them: the kernel takes the latter as a number of the host, for
        which the device would be waited for.
        """
        scales, whole = (self._parameters.get(leaf) for leaf in (CHANNEL_SCALES, TENSOR_SCALE))
        scales = like.new_ones(like.shape[1]) if scales is None else scales
        return scales if whole is None else (scales * whole).to(like.dtype)


SVDQUANT = NunchakuCore
