"""The one file of a 4-bit model, in Nunchaku's layout (github.com/nunchaku-tech/nunchaku) where it has one for the family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ..facts import ModelFacts
from ..families.written import NunchakuFile, PackedLinear
from ..nunchaku_names import FIRST_NAMES
from ..quant.awq import awq_linear
from ..quant.svdquant.formats import Format
from .weights import Entry, Weights, write_tensors, write_whole

DTYPE = torch.bfloat16
"""Of scales, vectors and low-rank matrices; of all else too in a file for Nunchaku, which takes no other."""
PLAIN = NunchakuFile("")
"""How a file of a family is written that Nunchaku does not have."""


def part_file(folder: Path, name: str) -> Path:
    """Where the tensors of a Linear are until the job is done."""
    return folder / f"{name}.safetensors"


def round_modulations(facts: ModelFacts, weights: Weights, folder: Path) -> list[str]:
    """Write the Linears of which Nunchaku has the weight alone in 4 bits, as parts; their names."""
    pattern = (facts.spec.nunchaku_file or PLAIN).modulation
    names = [name.removesuffix(".weight") for name in weights.names if name.endswith(".weight")]
    found = [name for name in names if pattern and re.fullmatch(pattern, name)]
    for name in found:
        if not part_file(folder, name).exists():
            weight, bias = (weights.read(f"{name}.{leaf}") for leaf in ("weight", "bias"))
            write_whole(part_file(folder, name), awq_linear(weight, bias, DTYPE))
    return found


def assemble(
    out: Path,
    folder: Path,
    facts: ModelFacts,
    weights: Weights,
    linears: Mapping[str, PackedLinear],
    modulations: Iterable[str],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Write the 4-bit Linears, and all else as it was, to `out`; it has that name when it is whole."""
    layout = facts.spec.nunchaku_file or PLAIN
    rounded = {linear for packed in linears.values() for linear in packed.linears} | set(modulations)
    entries: list[Entry] = []
    places: dict[str, tuple[Path | None, str]] = {}
    for name in (*linears, *modulations):
        with safe_open(part_file(folder, name), framework="pt") as file:
            for leaf in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(leaf)
                stored = FIRST_NAMES.get(leaf, leaf) if layout.first_names else leaf
                entries.append((f"{name}.{stored}", tensor.dtype, tuple(tensor.shape)))
                places[f"{name}.{stored}"] = part_file(folder, name), leaf
    for name in weights.names:
        if name.rpartition(".")[0] not in rounded:
            tensor, stored = _plain(weights.read(name), facts), _renamed(name, layout)
            entries.append((stored, tensor.dtype, tuple(tensor.shape)))
            places[stored] = None, name

    def read(stored: str) -> torch.Tensor:
        path, name = places[stored]
        if path is None:
            return _plain(weights.read(name), facts)
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    partial = out.with_name(f"{out.name}.partial")
    write_tensors(partial, entries, read, metadata=metadata)
    partial.replace(out)


def metadata_of(facts: ModelFacts, rank: int, form: Format) -> dict[str, str]:
    """As Nunchaku's files have it."""
    layout, own = facts.spec.nunchaku_file or PLAIN, facts.spec.transformer_class
    rounding = {
        "dtype": "fp4_e2m1_all" if form.is_float else "int4",
        "scale_dtype": "fp8_e4m3_nan" if form.is_float else None,
        "group_size": form.group,
    }
    weight = {**rounding, "scale_dtype": [None, "fp8_e4m3_nan"] if form.is_float else None}
    quantization = {"method": "svdquant", "weight": weight, "activation": rounding, "rank": rank}
    texts = {
        "model_class": layout.model_class or own,
        "config": {"_class_name": layout.model_class or own, **facts.config},
        "quantization_config": quantization,
        "comfy_config": layout.comfy_config and layout.comfy_config(facts.config),
    }
    return {key: text if isinstance(text, str) else json.dumps(text) for key, text in texts.items() if text is not None}


def _plain(tensor: torch.Tensor, facts: ModelFacts) -> torch.Tensor:
    return tensor.to(DTYPE) if facts.spec.nunchaku_file and tensor.is_floating_point() else tensor


def _renamed(name: str, layout: NunchakuFile) -> str:
    for pattern, replacement in layout.renames:
        name = re.sub(pattern, replacement, name)
    return name
