"""A text encoder with the weights of its file, such as ComfyUI's t5xxl_fp16, t5xxl_fp8_e4m3fn_scaled and qwen_3_4b.

Its configuration follows from the shapes. Weights in 8 bits are turned into numbers as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from ..configuration import building, check_names
from ..errors import Refused
from ..facts import Source
from ..layouts import LEAVES, WITHOUT_USE
from ..linear import local_part
from ..reading import WeightFile, mapped_safetensors
from ..safetensors_header import TensorEntry
from ..stored import WEIGHT_SCALE
from ..text_files import KINDS, OUTER, EncoderFile, TextPart
from ..weight_formats import check_eight_bit, check_formats
from .kinds import CLASSES, fill_tables
from .text_split import split_encoder
from .tokens import Tokenizer


def load_encoder(file: EncoderFile, *, dtype: torch.dtype, group: dist.ProcessGroup | None) -> nn.Module:
    """The encoder of a file with its weights; of a group, this rank's part. Raises `Refused` when they do not fit together."""
    kind = CLASSES[file.kind]
    shapes = {name: entry.shape for name, (_, _, entry) in file.tensors.items()}
    with building(kind.model_class, where=file.path):
        model = kind.model_class(kind.config_from(shapes))
    own = {OUTER.sub("", name): name for name in model.state_dict()}
    scales = _scales(file)
    weights = _weights(file, own)
    _check(file, model, own, weights, scales)
    _check_numbers(file, weights, kind.words)
    if group is not None:
        split_encoder(model, kind.cut(model.config), words=kind.words, group=group)
    try:
        _fill(model, file, own, weights, scales, dtype)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise Refused(f"{file.path} cannot be read as a {file.title} encoder: {str(error)[:300]}") from error
    for other in kind.words[1:]:
        model.set_submodule(other, model.get_submodule(kind.words[0]))
    fill_tables(model)
    return model


def load_tokenizer(part: TextPart) -> Tokenizer:
    """The tokenizer of an encoder: the one in its folder, else the one inside the file. Raises `Refused`."""
    if part.tokenizer is not None:
        return Tokenizer.from_folder(part.tokenizer, **CLASSES[part.use.kind].tokenizer)
    path, name = part.file.pieces
    with mapped_safetensors(path) as opened:
        return Tokenizer.from_pieces(
            bytes(opened.get_tensor(name).tolist()), where=path, **CLASSES[part.use.kind].pieces
        )


def _fill(
    model: nn.Module,
    file: EncoderFile,
    own: Mapping[str, str],
    weights: Mapping[str, tuple[Path, str]],
    scales: Mapping[str, tuple[Path, str]],
    dtype: torch.dtype,
) -> None:
    with ExitStack() as stack:
        opened = {
            path: stack.enter_context(WeightFile(Source(path, _as_they_are(file, path)), mapped=True))
            for path in {path for path, _, _ in file.tensors.values()}
        }
        for name, (path, stored) in weights.items():
            part = local_part(model, own[name])
            if part is None:
                continue
            tensor = opened[path].part(stored, part).to(dtype)
            if name in scales:
                path, stored = scales[name]
                tensor = tensor * opened[path].get_slice(stored)[:].to(dtype)
            part.place(tensor)


def _as_they_are(file: EncoderFile, path: Path) -> dict[str, str]:
    return {stored: stored for place, stored, _ in file.tensors.values() if place == path}


def _weights(file: EncoderFile, own: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """Where each tensor of the class is."""
    return {name: (path, stored) for name, (path, stored, _) in file.tensors.items() if name in own}


def _check(
    file: EncoderFile,
    model: nn.Module,
    own: Mapping[str, str],
    weights: Mapping[str, tuple[Path, str]],
    scales: Mapping[str, tuple[Path, str]],
) -> None:
    """Raise `Refused` where the tensors of a file are not those of the class."""
    told = {name for name in file.tensors if _leaf(name) in WITHOUT_USE or _is_scale(name)}
    idle = {name for name in file.tensors if re.fullmatch(KINDS[file.kind].unused, name)}
    tied = {f"{name}.weight" for name in CLASSES[file.kind].words[1:]}
    lacking = own.keys() - weights.keys() - tied
    check_names(file.path, lacking=lacking, unknown=file.tensors.keys() - weights.keys() - told - idle)
    for name, tensor in model.state_dict().items():
        _, stored, entry = file.tensors.get(OUTER.sub("", name), (None, "", None))
        if entry is None:
            continue
        if entry.shape != tuple(tensor.shape):
            raise Refused(
                f"{file.path} is damaged: {stored} is {entry.shape} and should be {tuple(tensor.shape)}. Download it again"
            )


def _scales(file: EncoderFile) -> dict[str, tuple[Path, str]]:
    """Where the number is that an 8-bit weight is multiplied by, by the name of that."""
    return {
        f"{name.rpartition('.')[0]}.weight": (path, stored)
        for name, (path, stored, _) in file.tensors.items()
        if _is_scale(name)
    }


def _check_numbers(file: EncoderFile, weights: Mapping[str, tuple[Path, str]], words: Iterable[str]) -> None:
    """Raise `Refused` for weights in formats that are not read. Tables of `words` may be in 8 bits without a scale."""
    headers: dict[Path, dict[str, TensorEntry]] = {}
    for path, stored, entry in file.tensors.values():
        headers.setdefault(path, {})[stored] = entry
    tables = {file.tensors[f"{name}.weight"][1] for name in words if f"{name}.weight" in file.tensors}
    check_eight_bit(headers, unscaled={name.removesuffix(".weight") for name in tables})
    check_formats(file.path, {stored: headers[path][stored].dtype for path, stored in weights.values()})


def _is_scale(name: str) -> bool:
    leaf = _leaf(name)
    return LEAVES.get(leaf, leaf) == WEIGHT_SCALE


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
