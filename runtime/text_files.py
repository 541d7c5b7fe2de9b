"""Text encoders as they lie in files: which one it is by the names of its tensors, and where its tokenizer is.

A file holds one encoder, or, as an all-in-one checkpoint does, several behind `text_encoders.KIND.transformer.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import Refused
from .families.texts import TextUse
from .file_names import SAFETENSORS, check_file_name
from .json_file import read_json
from .layouts import TEXT_ENCODER
from .safetensors_header import TensorEntry, read_header
from .weight_files import TRANSFORMERS, all_weight_files, merged, twice

PIECES = ("spiece_model", "text_encoders.spiece_model")
"""What a file and an all-in-one checkpoint call the model of a tokenizer inside it."""
OUTER = re.compile(r"^(text_model|model\.language_model|language_model|model)\.(?=\w)")
"""What stands before the names of some files, or of the classes of some versions, and not of others."""
TOKENIZER = "tokenizer"
FOLDER = "text_encoder"
NAMED = 3
Place = tuple[Path, str, TensorEntry]
"""A tensor's file, its name there, and what the header says of it."""
T5_GATE, T5_POSITIONS = "DenseReluDense.wi_0.weight", "SelfAttention.relative_attention_bias.weight"


@dataclass(frozen=True)
class EncoderKind:
    """An encoder by the tensors that its files have, and that those of its relatives have and it has not.

    `example` is what such a file is called, and `tokenizer` the folder of its tokenizer in ComfyUI's package `comfy`; empty
    where that is inside the file. `unused` is a pattern of tensors that files have and nobody reads; `outer` stands before
    its names in ComfyUI's files.
    """

    title: str
    example: str
    needs: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    tokenizer: str = ""
    unused: str = ""
    outer: str = ""


T5_NEEDS = ("shared.weight", f"encoder.block.0.layer.0.{T5_POSITIONS}", f"encoder.block.0.layer.1.{T5_GATE}")
T5_OWN_POSITIONS = f"encoder.block.1.layer.0.{T5_POSITIONS}"
"""What UMT5 has in every block, and T5 in the first alone."""
CLIP_NEEDS = ("embeddings.token_embedding.weight", "encoder.layers.0.mlp.fc1.weight")
CLIP_H_LAYER, CLIP_G_LAYER = "encoder.layers.22.mlp.fc1.weight", "encoder.layers.30.mlp.fc1.weight"
CLIP_UNUSED = r"logit_scale|embeddings\.position_ids|vision_model\..*|visual_projection\.weight"
"""The last two of files that have the half of CLIP that sees as well."""
QWEN_NEEDS = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
QWEN_UNUSED = r"lm_head\..*|(model\.)?visual\..*"
QWEN_TOKENIZER = "text_encoders/qwen25_tokenizer"
QWEN3_NORM, QWEN25_BIAS = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_proj.bias"
GEMMA_NORM = "layers.0.post_feedforward_layernorm.weight"

KINDS: Mapping[str, EncoderKind] = {
    "umt5xxl": EncoderKind("UMT5", "umt5_xxl", (*T5_NEEDS, T5_OWN_POSITIONS)),
    "t5xxl": EncoderKind("T5", "t5xxl", T5_NEEDS, (T5_OWN_POSITIONS,), "text_encoders/t5_tokenizer"),
    "clip_l": EncoderKind(
        "CLIP-L", "clip_l", CLIP_NEEDS, (CLIP_H_LAYER,), "sd1_tokenizer",
        unused=rf"text_projection(\.weight)?|{CLIP_UNUSED}", outer="text_model.",
    ),
    "clip_g": EncoderKind(
        "CLIP-G", "clip_g", (*CLIP_NEEDS, CLIP_G_LAYER), (), "sd1_tokenizer",
        unused=CLIP_UNUSED, outer="text_model.",
    ),
    "gemma2_2b": EncoderKind(
        "Gemma 2", "gemma_2_2b", (*QWEN_NEEDS, GEMMA_NORM), (QWEN3_NORM,), unused=QWEN_UNUSED, outer="model."
    ),
    "qwen3_4b": EncoderKind(
        "Qwen3", "qwen_3_4b", (*QWEN_NEEDS, QWEN3_NORM), (GEMMA_NORM, QWEN25_BIAS), QWEN_TOKENIZER, QWEN_UNUSED,
        "model.",
    ),
    "qwen25_7b": EncoderKind(
        "Qwen2.5-VL", "qwen_2.5_vl_7b", (*QWEN_NEEDS, QWEN25_BIAS), (QWEN3_NORM,), QWEN_TOKENIZER, QWEN_UNUSED,
        "model.",
    ),
}  # fmt: skip
"""By what ComfyUI calls them."""
CLASSES = {
    "UMT5EncoderModel": "umt5xxl", "T5EncoderModel": "t5xxl", "CLIPTextModel": "clip_l", "CLIPTextModelWithProjection": "", "Gemma2Model": "gemma2_2b", "Qwen3Model": "qwen3_4b",
    "Qwen3ForCausalLM": "qwen3_4b", "Qwen2_5_VLForConditionalGeneration": "qwen25_7b",
}  # fmt: skip
"""The kinds by what the folder of one says it is; empty where its tensors say which."""


@dataclass(frozen=True)
class EncoderFile:
    """An encoder in a file or folder: for each of its tensors the file, the name there, and what its header says.

    The names are without what `OUTER` fits. `pieces` is the model of a tokenizer inside it.
    """

    kind: str
    path: Path
    tensors: Mapping[str, Place] = field(repr=False)
    pieces: tuple[Path, str] | None = None

    @property
    def title(self) -> str:
        """What the encoder is called."""
        return KINDS[self.kind].title


@dataclass(frozen=True)
class TextPart:
    """One of a model's encoders: how it is read, where it is, and its tokenizer's folder (None: inside the file)."""

    use: TextUse
    file: EncoderFile
    tokenizer: Path | None

    @property
    def places(self) -> tuple[Path, ...]:
        """All files and folders that it comes from."""
        return (self.file.path, *([self.tokenizer] if self.tokenizer else []))


def find_encoders(path: Path) -> dict[str, EncoderFile]:
    """The encoders of a file, or of a folder of one, by kind. Raises `Refused` when it holds none that is read."""
    found: dict[str, EncoderFile] = {}
    of_folder = _kind_of_folder(path) if path.is_dir() else ""
    if not path.is_dir():
        check_file_name(path, SAFETENSORS)
    headers = {file: read_header(file) for file in _files(path)}
    merged(headers)
    tensors = {name: (file, name, entry) for file, header in headers.items() for name, entry in header.items()}
    pieces = next((tensors[name][:2] for name in PIECES if name in tensors), None)
    for prefix in sorted({each[0] for each in map(TEXT_ENCODER.match, tensors) if each}) or [""]:
        own = _own(path, tensors, prefix)
        if kind := of_folder or _kind_of(own):
            found[kind] = EncoderFile(kind, path, own, pieces)
    if not found:
        raise Refused(
            f"{path} is no text encoder that is read: it has {len(tensors)} tensors such as "
            f"{', '.join(sorted(tensors)[:NAMED])}; looked for those of: {', '.join(each.title for each in KINDS.values())}"
        )
    return found


def _own(path: Path, tensors: Mapping[str, Place], prefix: str) -> dict[str, Place]:
    """The tensors of one encoder by the names of its class. Raises `Refused` for one that is there under two names."""
    own: dict[str, Place] = {}
    for name, place in tensors.items():
        if name.startswith(prefix) and name not in PIECES:
            first = own.setdefault(OUTER.sub("", name.removeprefix(prefix), count=1), place)
            if first is not place:
                raise twice(path, first[1], name)
    return own


def tokenizer_of(file: EncoderFile, package: str) -> Path | None:
    """The folder of an encoder's tokenizer: beside it, or in ComfyUI's `package`; None where it is inside the file.

    Raises `Refused` when there is none.
    """
    places = list(_tokenizers(file, package))
    found = next((place for place in places if place.is_dir()), None)
    if found or file.pieces:
        return found if not file.pieces else None
    raise Refused(
        f"{file.path} ({file.title}) has no tokenizer inside or beside it: looked for {', '.join(map(str, places))}. Put the "
        f"tokenizer folder of a diffusers model there{_package_way_out(file, package)}"
    )


def _package_way_out(file: EncoderFile, package: str) -> str:
    inside = KINDS[file.kind].tokenizer
    if not inside or package:
        return ""
    return f", or name ComfyUI's folder, which has it as comfy/{inside}, in COMFYUI_PATH"


def _tokenizers(file: EncoderFile, package: str) -> Iterator[Path]:
    """Where it may be, nearest first."""
    inside = KINDS[file.kind].tokenizer
    if file.path.is_dir():
        yield file.path.parent / file.path.name.replace(FOLDER, TOKENIZER)
        yield file.path
        return
    yield file.path.parent / (Path(inside).name or TOKENIZER)
    if inside and package:
        yield Path(package) / inside


def _files(path: Path) -> list[Path]:
    return all_weight_files(path, TRANSFORMERS) if path.is_dir() else [path]


def _kind_of_folder(path: Path) -> str:
    named = read_json(path / "config.json").get("architectures")
    kinds = [CLASSES[each] for each in named if each in CLASSES] if isinstance(named, list) else []
    if not kinds:
        raise Refused(f"{path} holds {named or 'nothing'}, but a text encoder is one of: {', '.join(CLASSES)}")
    return kinds[0]


def _kind_of(names: Mapping[str, object]) -> str:
    for name, kind in KINDS.items():
        if all(each in names for each in kind.needs) and not any(each in names for each in kind.lacks):
            return name
    return ""
