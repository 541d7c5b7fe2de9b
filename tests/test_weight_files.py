"""Which files of a folder hold its weights: whole or in shards, with an index or without, and of which variant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.errors import Refused
from runtime.safetensors_header import TensorEntry
from runtime.weight_files import DIFFUSERS, TRANSFORMERS, all_weight_files, merged, weight_files

ONE = f"{DIFFUSERS}.safetensors"
SHARDS = [f"{DIFFUSERS}-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
HALF = [f"{DIFFUSERS}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
OLD = [f"{DIFFUSERS}-0000{number}-of-00002.fp16.safetensors" for number in (1, 2)]
INDEX, HALF_INDEX = f"{ONE}.index.json", f"{ONE}.index.fp16.json"


def folder(path: Path, names: list[str]) -> Path:
    """A folder of such empty files; an index names the shards of its variant."""
    for name in names:
        listed = {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]} if name == INDEX else {"a": HALF[1]}
        (path / name).write_text(json.dumps({"weight_map": listed}))
    return path


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ([ONE], [ONE]),
        ([ONE, *HALF, "ema.safetensors"], [ONE]),
        ([ONE, *SHARDS], [ONE]),
        (SHARDS, SHARDS),
        ([*SHARDS, *HALF], SHARDS),
        ([*SHARDS, INDEX], SHARDS[:2]),
        ([*SHARDS, INDEX, *HALF, HALF_INDEX], SHARDS[:2]),
        ([*HALF, HALF_INDEX], HALF[1:]),
        (HALF, HALF),
        (OLD, OLD),
        ([f"{DIFFUSERS}.bf16.safetensors"], [f"{DIFFUSERS}.bf16.safetensors"]),
    ],
)
def test_the_weights_of_a_folder_are_found(tmp_path, there, chosen):
    assert [file.name for file in weight_files(folder(tmp_path, there), DIFFUSERS)] == chosen


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([], f"{ONE} is missing: download"),
        (["ema.safetensors", f"{DIFFUSERS}.bin"], f"{ONE} is missing ({DIFFUSERS}.bin is a pickle"),
        (SHARDS[:2], f"{SHARDS[2]} is missing"),
        (SHARDS[1:], f"{SHARDS[0]} is missing"),
        (HALF[1:], f"{HALF[0]} is missing"),
        (OLD[:1], f"{OLD[1]} is missing"),
        ([SHARDS[0], INDEX], f"{SHARDS[1]} is missing"),
        ([INDEX], f"{SHARDS[0]} is missing"),
        ([*SHARDS, SHARDS[0].replace("of-00003", "of-00002")], "are shards of two sets"),
        ([*HALF, f"{DIFFUSERS}.bf16.safetensors"], "weights of 2 variants (bf16, fp16) and none without"),
    ],
)
def test_a_folder_without_all_of_its_weights_is_refused_with_what_is_missing(tmp_path, there, words):
    with pytest.raises(Refused) as refusal:
        weight_files(folder(tmp_path, there), DIFFUSERS)
    assert words in str(refusal.value) and str(tmp_path) in str(refusal.value), str(refusal.value)


def test_files_of_other_names_count_where_there_are_no_others(tmp_path):
    folder(tmp_path, ["t5.safetensors", "more.safetensors"])
    assert [file.stem for file in all_weight_files(tmp_path, TRANSFORMERS)] == ["more", "t5"]
    folder(tmp_path, ["model.safetensors", "model.fp16.safetensors"])
    assert [file.stem for file in all_weight_files(tmp_path, TRANSFORMERS)] == ["model"]


def test_a_tensor_in_two_files_is_refused_with_both():
    entry = TensorEntry("F32", (), 0, 4)
    assert merged({Path("a"): {"x": entry}, Path("b"): {"y": entry}}).keys() == {"x", "y"}
    with pytest.raises(Refused, match="a and b both have x"):
        merged({Path("a"): {"x": entry}, Path("b"): {"x": entry}})
