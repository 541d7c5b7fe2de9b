"""A T5 encoder cut over the tensor axis: its heads, its feed-forward layers and its words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import UMT5EncoderModel

from ..configuration import check_names, empty_model
from ..errors import Refused
from ..facts import Source
from ..families.cuts import LinearShard, TensorSplit
from ..linear import ParallelEmbedding, local_part, swap_linears
from ..parallel.shares import even_lengths
from ..reading import WeightFile

LAYER = r"encoder\.block\.\d+\.layer"
SPLIT = TensorSplit(
    linears=(
        LinearShard(rf"{LAYER}\.0\.SelfAttention\.[qkv]", "column"),
        LinearShard(rf"{LAYER}\.0\.SelfAttention\.o", "row"),
        LinearShard(rf"{LAYER}\.1\.DenseReluDense\.wi(_[01])?", "column"),
        LinearShard(rf"{LAYER}\.1\.DenseReluDense\.wo", "row"),
    ),
)
WORDS = ("shared", "encoder.embed_tokens")
"""Two names of one table; a file has either or both."""


def load_split(
    folder: Path,
    *,
    build: Callable[[dict[str, Any]], UMT5EncoderModel],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> UMT5EncoderModel:
    """The encoder of a folder with this rank's part of the weights, of which no more is read. All ranks of the group call it.

    Raises `Refused` when the folder does not hold what it should.
    """
    model, headers = empty_model(UMT5EncoderModel, folder, build=build)
    known, present = set(model.state_dict()), {name for header in headers.values() for name in header}
    tied = {f"{name}.weight" for name in WORDS}
    lacking = known - present - (tied if tied & present else set())
    check_names(folder, lacking=lacking, unknown=present - known)
    split_encoder(model, group)
    for path, header in headers.items():
        try:
            with WeightFile(Source(path, {name: name for name in header}), mapped=True) as file:
                for name in header:
                    part = local_part(model, name)
                    part.place(file.part(name, part).to(dtype))
        except (OSError, SafetensorError) as error:
            raise Refused(f"{path} cannot be read: {error}") from error
    return model


def split_encoder(model: UMT5EncoderModel, group: dist.ProcessGroup) -> None:
    """Put layers with this rank's part in the place of those of an encoder without weights.

    Raises `Refused` when there are fewer heads than ranks.
    """
    heads, rank, degree = model.config.num_heads, dist.get_rank(group), dist.get_world_size(group)
    if heads < degree:
        raise Refused(
            f"the text encoder has {heads} heads, fewer than tensor {degree}: set tensor to {heads} or less, or use a CLIP "
            f"Loader and CLIP Text Encode"
        )
    swap_linears(model, SPLIT, head_dim=model.config.d_kv, group=group)
    words = ParallelEmbedding(model.get_submodule(WORDS[0]), mode="gather", group=group)
    for name in WORDS:
        model.set_submodule(name, words)
    for name, module in list(model.named_modules()):
        if re.fullmatch(rf"{LAYER}\.0\.SelfAttention", name):
            module.n_heads = even_lengths(heads, degree)[rank]
            if module.has_relative_attention_bias:
                module.relative_attention_bias = ParallelEmbedding(
                    module.relative_attention_bias, mode="column", group=group
                )
