"""A UMT5 encoder from the folder of a diffusers model, by the config.json there: whole, or cut over the tensor axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import UMT5Config, UMT5EncoderModel

from ..configuration import check_names, empty_model
from ..errors import Refused
from ..facts import Source
from ..json_file import read_json
from ..linear import local_part
from ..reading import WeightFile
from ..weight_files import TRANSFORMERS
from .kinds import CLASSES, fill_tables
from .text_split import split_encoder


def load_umt5(folder: Path, *, dtype: torch.dtype, group: dist.ProcessGroup | None) -> UMT5EncoderModel:
    """The encoder, or of a group this rank's part of it, of which no more is read. All ranks of the group call it.

    Raises `Refused` when the folder does not hold what it should.
    """
    wanted, kinds = UMT5EncoderModel.__name__, read_json(folder / "config.json").get("architectures")
    if not isinstance(kinds, list) or wanted not in kinds:
        raise Refused(f"{folder} holds {kinds or 'nothing'}, but the text encoder must be a {wanted}")
    kind = CLASSES["umt5xxl"]
    model, headers = empty_model(UMT5EncoderModel, folder, stem=TRANSFORMERS, build=_without_weights)
    known, present = set(model.state_dict()), {name for header in headers.values() for name in header}
    tied = {f"{name}.weight" for name in kind.words}
    lacking = known - present - (tied if tied & present else set())
    check_names(folder, lacking=lacking, unknown=present - known)
    if group is not None:
        split_encoder(model, kind.cut(model.config), words=kind.words, group=group)
    for name in kind.words:
        model.set_submodule(name, model.get_submodule(kind.words[0]))
    for path, header in headers.items():
        try:
            with WeightFile(Source(path, {name: name for name in header}), mapped=True) as file:
                for name in header:
                    part = local_part(model, name)
                    part.place(file.part(name, part).to(dtype))
        except (OSError, SafetensorError) as error:
            raise Refused(f"{path} cannot be read: {error}") from error
    fill_tables(model)
    return model


def _without_weights(config: dict[str, Any]) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config.from_dict(config))
