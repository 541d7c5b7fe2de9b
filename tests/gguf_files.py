"""GGUF files of a small Wan, as tools for ComfyUI write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import diffusers
import gguf
import numpy as np
import torch

from runtime.checkpoint import random_tensors
from runtime.stored import BLOCKS
from runtime.tiny_shapes.export import to_comfy_transformer

CONFIG = {
    "num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 1024, "num_layers": 2, "text_dim": 4096,
    "freq_dim": 256, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
SCALE = 0.005
"""About the size of a 16-bit scale, so that random codes are weights of a usual size."""
WIDE = ("text_embedding", "time_embedding", "patch_embedding", "head")
"""What such tools leave in 16 or 32 bits."""


def original_weights() -> dict[str, np.ndarray]:
    """A small Wan in the original names."""
    with torch.device("meta"):
        shapes = diffusers.WanTransformer3DModel(**CONFIG).state_dict()
    drawn = dict(random_tensors({name: tensor.shape for name, tensor in shapes.items()}))
    return {name: tensor.numpy() for name, tensor in to_comfy_transformer(drawn).items()}


def random_blocks(shape: tuple[int, ...], kind: str, *, seed: int = 0) -> np.ndarray:
    """Rows of random codes with scales of a usual size: `(..., bytes)` uint8. The package cannot make those of 256 numbers."""
    block, generator = BLOCKS[kind], np.random.default_rng(seed)
    count = int(np.prod(shape)) // block.elements
    blocks = generator.integers(0, 256, (count, block.nbytes), dtype=np.uint8)
    places = {
        "Q6_K": (208,),
        "Q5_K": (0, 2),
        "Q4_K": (0, 2),
        "Q3_K": (108,),
        "Q2_K": (80, 82),
        "Q5_1": (0, 2),
        "Q4_1": (0, 2),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "MXFP4": (),
        "NVFP4": (),
        "IQ1_M": (),
    }.get(kind, (0,))
    size = SCALE / {
        "Q6_K": 500,
        "Q5_K": 300,
        "Q4_K": 200,
        "Q3_K": 60,
        "Q2_K": 20,
        "Q8_0": 60,
        "IQ4_XS": 900,
        "IQ3_S": 100,
    }.get(kind, 8)
    for place in places:
        scales = generator.uniform(size / 2, size, (count, 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(114, 118, count)
    if kind == "NVFP4":
        blocks[:, :4] &= 31
    if kind == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 15 | 16  # the upper bits of its scale
    return blocks.reshape(*shape[:-1], shape[-1] // block.elements * block.nbytes)


def as_blocks(array: np.ndarray, kind: str) -> np.ndarray:
    """An array in blocks: rounded where the package can, else of random codes."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(array, number)
    except NotImplementedError:
        return random_blocks(array.shape, kind, seed=array.shape[0])


def write_wan(path: Path, kind: str, *, prefix: str = "", plain: str = "F32") -> dict[str, np.ndarray]:
    """A Wan with the matrices of its blocks in a format, and what they stand for by the package's own reading."""
    writer, numbers = gguf.GGUFWriter(path, "wan"), {}
    for name, array in original_weights().items():
        if name == "patch_embedding.weight":  # of five dims, which GGUF has not
            writer.add_array(f"comfy.gguf.orig_shape.{prefix}{name}", [int(size) for size in array.shape])
            array = array.reshape(array.shape[0], -1)
        coded = name.endswith(".weight") and array.ndim == 2 and not name.startswith(WIDE)
        number = gguf.GGMLQuantizationType[kind if coded else plain if array.ndim > 1 else "F32"]
        stored = as_blocks(array, kind) if coded else gguf.quants.quantize(array, number)
        writer.add_tensor(prefix + name, stored, raw_dtype=number)
        numbers[name] = gguf.quants.dequantize(stored, number).reshape(original_shape(name, array))
    finish(writer)
    return numbers


def original_shape(name: str, array: np.ndarray) -> tuple[int, ...]:
    """The shape before a tensor of five dims was flattened."""
    return (array.shape[0], 16, 1, 2, 2) if name == "patch_embedding.weight" else array.shape


def write_tensors(path: Path, tensors: Mapping[str, tuple[np.ndarray, str]], **values: list[int] | str) -> Path:
    """A file of these tensors, each with its format; `values` are arrays and texts of its metadata."""
    writer = gguf.GGUFWriter(path, "flux")
    for name, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_array)(name, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
