"""Run as a program: how far 4-bit Linears in Triton kernels, interpreted on the processor, are from plain torch, as JSON.

In a process of its own, since Triton has to be told before it is imported; fp32 and fp16, as its interpreter multiplies
no bf16.
"""

from __future__ import annotations

import json
import os
from itertools import product

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import nn
from torch.nn.functional import gelu

from runtime.linear import ParallelLinear
from runtime.stored import AWQ_INT4, IN_TORCH, IN_TRITON, Stored
from tests.ranks import relative_error
from tests.test_svdquant import KINDS, filled
from tests.test_svdquant_format import awq_words, drawn

CASES = {"fp32": (136, 192, torch.float32), "fp16": (256, 256, torch.float16)}
"""Output and input features: of tiles that are not full, and that are."""
TOKENS = (2, 11)


def svdquant_errors() -> dict[str, float]:
    """Of every kind, with and without a bias."""
    found = {}
    for kind, (name, (n, k, dtype)) in product(KINDS, CASES.items()):
        x = torch.randn(*TOKENS, k, generator=torch.Generator().manual_seed(1)).to(dtype)
        x = gelu(x) if KINDS[kind].unsigned else x
        plain, kernels = (filled(n, k, kind, dtype=dtype, kernels=kernels).core for kernels in (IN_TORCH, IN_TRITON))
        for bias in (None, torch.linspace(-1, 1, n, dtype=dtype)):
            output = kernels(x, bias)
            assert output.shape == (*TOKENS, n) and output.dtype == dtype
            label = f"{kind} {n}x{k} {name} {'no ' if bias is None else ''}bias"
            found[label] = relative_error(output.double(), plain(x, bias).double())
    return found


def awq_errors() -> dict[str, float]:
    """Of the modulation, with 1 and 3 rows of input."""
    parts, width = 3, 128
    tensors = {
        "qweight": awq_words(drawn(parts * width, width, below=16)),
        "wscales": torch.rand(width // 64, parts * width, generator=torch.Generator().manual_seed(0)),
        "wzeros": torch.rand(width // 64, parts * width, generator=torch.Generator().manual_seed(1)),
        "bias": torch.zeros(parts * width),
    }
    outputs = {}
    for kernels in (IN_TORCH, IN_TRITON):
        stored = Stored(AWQ_INT4, {leaf: tuple(t.shape) for leaf, t in tensors.items()}, kernels=kernels)
        layer = ParallelLinear(nn.Linear(width, parts * width, device="meta"), stored=stored)
        for leaf, tensor in tensors.items():
            part = layer.local_part(leaf)
            part.place(part.cut.take(tensor))
        outputs[kernels] = [
            layer(torch.randn(rows, width, generator=torch.Generator().manual_seed(2))) for rows in (1, 3)
        ]
    pairs = zip(*(outputs[kernels] for kernels in (IN_TRITON, IN_TORCH)), strict=True)
    return {f"{AWQ_INT4} {len(one)} rows": relative_error(one, other) for one, other in pairs}


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps({**svdquant_errors(), **awq_errors()}))
