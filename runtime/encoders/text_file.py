"""The UMT5 encoder of a single file, such as ComfyUI's umt5_xxl_fp16 and umt5_xxl_fp8_e4m3fn_scaled.

Its configuration follows from the shapes, and its tokenizer is a tensor of bytes, `spiece_model`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import UMT5Config, UMT5EncoderModel

from ..configuration import building, check_names
from ..errors import Refused
from ..facts import Source
from ..layouts import LEAVES, WITHOUT_USE
from ..linear import local_part
from ..reading import WeightFile
from ..safetensors_header import TensorEntry, read_header
from ..stored import WEIGHT_SCALE
from .text_split import WORDS, split_encoder
from .tokens import Tokenizer

PIECES = "spiece_model"
ATTENTION, FEED_FORWARD = "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"
OWN_POSITIONS = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
"""What UMT5 has in every block, and T5 in the first alone."""
NEEDED = ("shared.weight", f"{ATTENTION}.relative_attention_bias.weight", f"{FEED_FORWARD}.wi_0.weight", OWN_POSITIONS)
WAY_OUT = "use a CLIP Loader (type wan) and CLIP Text Encode, or choose umt5_xxl"


def load_text_file(
    path: Path, *, length: int, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> tuple[UMT5EncoderModel, Tokenizer]:
    """The encoder with its weights (of a group, this rank's part), and its tokenizer.

    Raises `Refused` when the file is another encoder, or has no tokenizer inside or beside it.
    """
    header = read_header(path)
    lacking = [name for name in NEEDED if name not in header]
    if lacking:
        raise Refused(f"{path} is no UMT5 encoder (it lacks {lacking[0]}): {WAY_OUT}")
    model, scales = _without_weights(path, header), _scales(path, header)
    names = [name for name in header if name.endswith(".weight")]
    unknown = set(header) - {*names, *scales.values(), PIECES, *(name for name in header if _leaf(name) in WITHOUT_USE)}
    known = set(model.state_dict())
    check_names(path, lacking=known - {*names, f"{WORDS[1]}.weight"}, unknown=unknown | (set(names) - known))
    if group is not None:
        split_encoder(model, group)
    try:
        with WeightFile(Source(path, {name: name for name in header}), mapped=True) as file:
            for name in names:
                part = local_part(model, name)
                tensor = file.part(name, part).to(dtype)
                part.place(tensor * file.get_slice(scales[name])[:].to(dtype) if name in scales else tensor)
            pieces = bytes(file.get_slice(PIECES)[:].tolist()) if PIECES in header else b""
    except (OSError, RuntimeError, SafetensorError) as error:
        raise Refused(f"{path} cannot be read as a UMT5 encoder: {str(error)[:300]}") from error
    model.set_submodule(WORDS[1], model.get_submodule(WORDS[0]))
    return model, _tokenizer(path, pieces, length=length)


def _tokenizer(path: Path, pieces: bytes, *, length: int) -> Tokenizer:
    """The one inside the file, else the one in a folder beside it."""
    if pieces:
        return Tokenizer.from_pieces(pieces, length=length, where=path)
    beside = path.parent / "tokenizer"
    if beside.is_dir():
        return Tokenizer.from_folder(beside, length=length)
    raise Refused(
        f"{path} has no tokenizer inside ({PIECES}): put the tokenizer folder of a diffusers model beside it, as {beside}, or "
        f"{WAY_OUT}"
    )


def _without_weights(path: Path, header: Mapping[str, TensorEntry]) -> UMT5EncoderModel:
    """The class of these shapes."""
    try:
        words, width = header["shared.weight"].shape
        buckets, heads = header[f"{ATTENTION}.relative_attention_bias.weight"].shape
        features, hidden = header[f"{ATTENTION}.q.weight"].shape[0], header[f"{FEED_FORWARD}.wi_0.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise Refused(f"{path} is damaged: its tensors do not fit together ({error}). Download it again") from error
    layers = {found[1] for name in header if (found := re.match(r"encoder\.block\.(\d+)\.", name))}
    with building(UMT5EncoderModel, where=path):
        model = UMT5EncoderModel(
            UMT5Config(
                vocab_size=words, d_model=width, d_kv=features // max(1, heads), d_ff=hidden, num_layers=len(layers),
                num_heads=heads, relative_attention_num_buckets=buckets, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            )
        )  # fmt: skip
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        if name in header and header[name].shape != shape:
            raise Refused(f"{path} is damaged: {name} is {header[name].shape} and should be {shape}. Download it again")
    return model


def _scales(path: Path, header: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The tensor that scales an 8-bit weight, by the name of that."""
    found = {}
    for name, entry in header.items():
        if LEAVES.get(_leaf(name), _leaf(name)) == WEIGHT_SCALE:
            if math.prod(entry.shape) != 1:
                raise Refused(f"{path}: {name} is {entry.shape}, but a weight is scaled by one number: {WAY_OUT}")
            found[f"{name.rpartition('.')[0]}.weight"] = name
    return found


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
