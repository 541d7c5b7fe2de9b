"""Run as a program: how far 4-bit Linears in Triton kernels, interpreted on the processor, are from plain torch, as JSON.

In a process of its own, since Triton has to be told before it is imported. Its interpreter multiplies bf16 as if they were
whole numbers, and cuts what it rounds to bf16: here it is made to widen them first.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import gelu
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from runtime import pipeline
from runtime.kernels import Kernels
from runtime.linear import ParallelLinear
from runtime.mesh import Mesh
from runtime.parallel.shares import Cut
from runtime.quant.core import Core
from runtime.quant.kernels import four_bit_core
from runtime.quant.svdquant.tensors import Packing
from runtime.stored import AWQ_INT4, IN_TORCH, IN_TRITON, Stored
from tests.lora_files import Draw, kohya
from tests.nunchaku_packer import packed_modulation
from tests.ranks import Case, relative_error, run_case
from tests.test_svdquant import KINDS, RANK, filled, plain_tensors
from tests.test_svdquant_format import drawn

CASES = {"fp32": (136, 192, torch.float32), "fp16": (256, 256, torch.float16), "bf16": (128, 256, torch.bfloat16)}
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


def shard_errors() -> dict[str, float]:
    """Of columns put beside each other, and of rows added up, of ranks that cut whole tiles and parts of one."""
    found = {}
    for kind, (degree, part) in product(KINDS, ((2, 128), (3, 64))):
        size, other = degree * part, 128
        for dim, (n, k) in enumerate(((size, other), (other, size))):
            x = torch.randn(5, k, generator=torch.Generator().manual_seed(1)).abs()
            outputs = []
            for rank in range(degree):
                cut = Cut.of_blocks(dim, size, blocks=(1,), rank=rank, degree=degree)
                own = x[:, part * rank : part * (rank + 1)] if dim else x
                outputs.append(cut_core(n, k, kind, cut)(own, None))
            output = sum(outputs) if dim else torch.cat(outputs, dim=1)
            expected = filled(n, k, kind).core(x, None)
            found[f"{kind} {'row' if dim else 'column'} over {degree} fp32"] = relative_error(output, expected)
    return found


def cut_core(n: int, k: int, kind: str, cut: Cut) -> Core:
    """A rank's part of a Linear, in Triton."""
    packing = Packing(n, k, RANK, KINDS[kind])
    packed = {leaf: packing.packed(leaf, tensor) for leaf, tensor in plain_tensors(n, k, KINDS[kind]).items()}
    stored = Stored(kind, {leaf: tuple(tensor.shape) for leaf, tensor in packed.items()}, kernels=IN_TRITON)
    core = four_bit_core(nn.Linear(k, n, device="meta"), cut, stored)
    for leaf, tensor in packed.items():
        if leaf != "bias":
            core.place(leaf, core.part(leaf).take(tensor))
    return core


def model_errors() -> dict[str, float]:
    """Of a whole model with a LoRA, its packed blocks streamed from host memory."""
    found = {}
    with TemporaryDirectory() as folder:
        for kind in ("svdquant-int4", "svdquant-nvfp4"):
            case = Case(quant=kind, latent=(1, 16, 1, 4, 4), steps=1, cfg=1.0)
            layers = {"blocks.0.attn1.to_q": (128, 128), "blocks.1.ffn.net.2": (128, 256)}
            lora = Path(folder) / "lora.safetensors"
            save_file(kohya(layers, Draw(1)), lora)
            latents = {}
            for kernels, memory in (
                (IN_TORCH, {}),
                (IN_TRITON, {"offload": "layerwise", "resident_blocks": "0"}),
            ):
                pipeline.usable_kernels = lambda *_, kernels=kernels, **__: Kernels(kernels)
                with_lora = replace(case, loras=(str(lora),), memory=memory)
                latents[kernels] = run_case(with_lora, Mesh.single(), {})
            found[f"model {kind}"] = relative_error(latents[IN_TRITON], latents[IN_TORCH])
    return found


def widen_products() -> None:
    """Have the interpreter multiply what bf16 stand for."""
    dot = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def awq_errors() -> dict[str, float]:
    """Of the modulation, with 1 and 3 rows of input."""
    parts, width = 3, 128
    tensors = {
        "qweight": packed_modulation(drawn(parts * width, width, below=16)),
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
    widen_products()
    with torch.inference_mode():
        print(json.dumps({**svdquant_errors(), **awq_errors(), **shard_errors(), **model_errors()}))
