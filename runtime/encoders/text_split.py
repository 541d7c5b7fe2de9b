"""A text encoder cut over the tensor axis: its heads, its feed-forward layers and its words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from transformers import UMT5EncoderModel

from ..configuration import check_names, empty_model
from ..errors import Refused
from ..facts import Source
from ..linear import ParallelEmbedding, local_part, swap_linears
from ..parallel.shares import even_lengths
from ..reading import WeightFile
from ..weight_files import TRANSFORMERS
from .kinds import CLASSES, Cut


def load_split(
    folder: Path,
    *,
    build: Callable[[dict[str, Any]], UMT5EncoderModel],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> UMT5EncoderModel:
    """The UMT5 encoder of a folder with this rank's part of the weights, of which no more is read. All ranks of the group
    call it.

    Raises `Refused` when the folder does not hold what it should.
    """
    kind = CLASSES["umt5xxl"]
    model, headers = empty_model(UMT5EncoderModel, folder, stem=TRANSFORMERS, build=build)
    known, present = set(model.state_dict()), {name for header in headers.values() for name in header}
    tied = {f"{name}.weight" for name in kind.words}
    lacking = known - present - (tied if tied & present else set())
    check_names(folder, lacking=lacking, unknown=present - known)
    split_encoder(model, kind.cut(model.config), words=kind.words, group=group)
    for path, header in headers.items():
        try:
            with WeightFile(Source(path, {name: name for name in header}), mapped=True) as file:
                for name in header:
                    part = local_part(model, name)
                    part.place(file.part(name, part).to(dtype))
        except (OSError, SafetensorError) as error:
            raise Refused(f"{path} cannot be read: {error}") from error
    return model


def split_encoder(model: nn.Module, cut: Cut, *, words: tuple[str, ...], group: dist.ProcessGroup) -> None:
    """Put layers with this rank's part in the place of those of an encoder without weights; `words` names its table of words.

    Raises `Refused` when there are fewer heads than ranks.
    """
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    if cut.heads < degree:
        raise Refused(
            f"the text encoder has {cut.heads} heads, fewer than tensor {degree}: set tensor to {cut.heads} or less, or use a "
            f"CLIP Loader and CLIP Text Encode"
        )
    swap_linears(model, cut.split, head_dim=cut.head_dim, group=group)
    outer = "text_model." if hasattr(model, "text_model") else ""
    table = ParallelEmbedding(model.get_submodule(f"{outer}{words[0]}"), mode="gather", group=group)
    for name in words:
        model.set_submodule(f"{outer}{name}", table)
    for module in list(model.modules()):
        if hasattr(module, "n_heads"):  # T5's attention, which has a bias of places for each head
            module.n_heads = even_lengths(cut.heads, degree)[rank]
            module.inner_dim = module.n_heads * module.key_value_proj_dim  # read before transformers 5
            if module.has_relative_attention_bias:
                module.relative_attention_bias = ParallelEmbedding(
                    module.relative_attention_bias, mode="column", group=group
                )
