"""A weight in 8 bits, its mark and its scale fit together, or the file is refused by the name of what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import Refused
from runtime.inspection import inspect_model
from runtime.safetensors_header import read_header
from runtime.weight_formats import check_eight_bit
from tests.test_fp8 import E4M3, E5M2, in_eight_bits, original_weights

LAYER = "blocks.0.ffn.0"
MARK, SCALE, WEIGHT = (f"{LAYER}.{leaf}" for leaf in ("comfy_quant", "weight_scale", "weight"))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def marked() -> Tensors:
    return in_eight_bits(original_weights(), "marked")


def mark(text: str | dict) -> torch.Tensor:
    content = text if isinstance(text, str) else json.dumps(text)
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


def saved(path: Path, tensors: Tensors, **options: dict[str, str]) -> str:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, **options)
    return str(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({SCALE: None}, f"{LAYER} is marked as float8_e4m3fn, but has no weight_scale"),
        ({WEIGHT: torch.zeros(256, 256)}, f"{LAYER} is marked as float8_e4m3fn, but its weight is F32"),
        ({MARK: mark({"format": "float8_e5m2"})}, f"{LAYER} is marked as float8_e5m2, but its weight is F8_E4M3"),
        (
            {MARK: mark({"format": "nvfp4"})},
            f"{LAYER} is marked as nvfp4, which is not available; there are float8_e4m3fn",
        ),
        ({MARK: mark({"format": ["mxfp8"]})}, f"{LAYER} is marked as ['mxfp8'], which is not"),
        ({MARK: mark({})}, f"the mark of {LAYER} names no format ('{{}}')"),
        ({MARK: mark("{'format'")}, f"the mark of {LAYER} names no format"),
        ({MARK: mark("[" * 4000)}, f"the mark of {LAYER} names no format"),
        ({MARK: mark("")}, f"the mark of {LAYER} names no format ('')"),
        ({MARK: torch.zeros(9000, dtype=torch.uint8)}, f"{MARK} is U8 (9000,), and no mark"),
        ({MARK: torch.zeros(9)}, f"{MARK} is F32 (9,), and no mark"),
        ({MARK: None, WEIGHT: torch.zeros(256, 256)}, f"{SCALE} scales a weight in 8 bits, but that is F32"),
        (
            {MARK: None, WEIGHT: torch.zeros(256, 256, dtype=torch.uint8)},
            f"{SCALE} scales a weight in 8 bits, but that is U8",
        ),
        ({SCALE: torch.ones(256, 1)}, f"{SCALE} is (256, 1), but a weight in 8 bits is scaled by one number"),
        ({SCALE: torch.ones(0)}, f"{SCALE} is (0,), but a weight in 8 bits is scaled by one number"),
        ({SCALE: torch.tensor(1)}, f"{SCALE} is I64, and a scale is one of F64, F32, F16, BF16"),
        ({SCALE: torch.tensor(1.0).to(E4M3)}, f"{SCALE} is F8_E4M3, and a scale"),
        ({SCALE: torch.tensor(float("nan"))}, f"{SCALE} is nan, but a scale is above 0"),
        ({SCALE: torch.tensor(float("inf"), dtype=torch.bfloat16)}, f"{SCALE} is inf, but"),
        ({SCALE: torch.tensor([-0.5], dtype=torch.float16)}, f"{SCALE} is -0.5, but"),
        ({SCALE: torch.tensor(0.0, dtype=torch.float64)}, f"{SCALE} is 0, but"),
        ({f"{LAYER}.scale_weight": torch.tensor(0.5)}, f"has {LAYER}.scale_weight and {SCALE}, which are one tensor"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(marked, tmp_path, change, words):
    tensors = {name: tensor for name, tensor in {**marked, **change}.items() if tensor is not None}
    with pytest.raises(Refused) as refusal:
        inspect_model(saved(tmp_path / "marked.safetensors", tensors))
    assert words in str(refusal.value) and str(tmp_path) in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_fits_together_is_read_with_or_without_a_mark(marked, tmp_path, dtype):
    tensors = {**marked, SCALE: torch.tensor([0.25], dtype=dtype)}
    for name, change in {"marked": {}, "bare": {MARK: None}, "e5m2": {WEIGHT: marked[WEIGHT].to(E5M2)}}.items():
        changed = {**tensors, **change, **({MARK: mark({"format": "float8_e5m2"})} if name == "e5m2" else {})}
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        facts = inspect_model(saved(tmp_path / f"{name}.safetensors", kept))
        assert facts.stored["blocks.0.ffn.net.0.proj"].kind == ("fp8-e5m2" if name == "e5m2" else "fp8")


def test_marks_in_the_metadata_of_a_file_count_too(marked, tmp_path):
    tensors = {
        f"model.diffusion_model.{name}": each for name, each in marked.items() if not name.endswith("comfy_quant")
    }
    for said, words in (
        ({"layers": {LAYER: {"format": "float8_e4m3fn"}, "of.another.model": {"format": "x"}}}, ""),
        ({"layers": {LAYER: {"format": "nvfp4"}}}, f"model.diffusion_model.{LAYER} is marked as nvfp4"),
        ({"layers": 3}, "_quantization_metadata in its metadata cannot be read"),
    ):
        path = saved(tmp_path / "said.safetensors", tensors, metadata={"_quantization_metadata": json.dumps(said)})
        if words:
            with pytest.raises(Refused) as refusal:
                inspect_model(path)
            assert words in str(refusal.value), str(refusal.value)
        else:
            assert inspect_model(path).stored["blocks.0.ffn.net.0.proj"].kind == "fp8"


def test_a_mark_may_be_in_another_shard_than_its_weight_and_a_table_of_words_have_no_scale(tmp_path):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    saved(paths[0], {"words.weight": torch.zeros(4, 4).to(E4M3)})
    saved(paths[1], {"words.comfy_quant": mark({"format": "float8_e4m3fn"})})
    headers = {path: read_header(path) for path in paths}
    with pytest.raises(Refused, match=r"words is marked as float8_e4m3fn, but its weight is not there"):
        check_eight_bit({paths[1]: headers[paths[1]]})
    check_eight_bit(headers, unscaled={"words"})
    with pytest.raises(Refused, match=r"b\.safetensors: words is marked as float8_e4m3fn, but has no weight_scale"):
        check_eight_bit(headers)
