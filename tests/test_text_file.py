"""A UMT5 encoder in one file, its tokenizer inside, gives what the class gives."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import UMT5Config, UMT5EncoderModel

from runtime.encoders.text import TextEncoder
from runtime.encoders.umt5_folder import load_umt5
from runtime.errors import Refused
from runtime.families.texts import UMT5
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from runtime.text_files import TextPart, find_encoders, tokenizer_of
from tests.ranks import run_as_threads

E4M3 = torch.float8_e4m3fn
PROMPT = "a red circle on a white background, left of a blue square"
LENGTH, WORDS = 32, 80


@pytest.fixture(scope="module")
def pieces() -> bytes:
    """A small tokenizer, of the kind that is inside such files."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([PROMPT, "the quick brown fox jumps over the lazy dog"] * 20), model_writer=model,
        vocab_size=WORDS, model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


@pytest.fixture(scope="module")
def model() -> UMT5EncoderModel:
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=WORDS + 20, d_model=64, d_kv=16, num_heads=4, d_ff=96, num_layers=3, dropout_rate=0.0
    )
    model = UMT5EncoderModel(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.5 if "bias" in name or "shared" in name else weight[0].numel() ** -0.5 / 2)
    return model


@pytest.fixture
def tensors(model, pieces) -> dict[str, torch.Tensor]:
    """What ComfyUI's file has: the words once, and the tokenizer as bytes."""
    weights = {name: each.clone() for name, each in model.state_dict().items() if name != "encoder.embed_tokens.weight"}
    return {**weights, "spiece_model": torch.frombuffer(bytearray(pieces), dtype=torch.uint8)}


def saved(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "umt5.safetensors")
    return folder / "umt5.safetensors"


def load(path: Path, mesh: Mesh) -> TextEncoder:
    file = find_encoders(path)["umt5xxl"]
    part = TextPart(replace(UMT5[0], length=LENGTH), file, tokenizer_of(file, ""))
    return TextEncoder.load([part], dtype=torch.float32, device=mesh.device, group=mesh.group("tensor"))


def encoded(path: Path, mesh: Mesh) -> torch.Tensor:
    return load(path, mesh).encode(PROMPT, progress=ignore_progress).embedding


def expected(model: UMT5EncoderModel, pieces: bytes) -> torch.Tensor:
    """By the class, and by ComfyUI's way with the tokenizer: the end, then padding, which is masked."""
    ids = [*SentencePieceProcessor(model_proto=pieces).encode(PROMPT), 1]
    mask = torch.tensor([[1] * len(ids) + [0] * (LENGTH - len(ids))])
    with torch.inference_mode():
        hidden = model(torch.tensor([ids + [0] * (LENGTH - len(ids))]), attention_mask=mask).last_hidden_state
    return hidden * mask.unsqueeze(-1)


def test_a_file_encodes_as_the_class_on_one_rank_and_on_two(tensors, model, pieces, tmp_path):
    path, reference = saved(tensors, tmp_path), expected(model, pieces)
    assert torch.allclose(encoded(path, Mesh.single()), reference, atol=1e-5) and reference.abs().max() > 0.1
    for result in run_as_threads({"tensor": 2}, lambda mesh: encoded(path, mesh)):
        assert torch.allclose(result, reference, atol=1e-5)


@pytest.mark.parametrize("leaf", ["scale_weight", "weight_scale"])
def test_scaled_weights_mean_codes_times_scale(tensors, model, pieces, tmp_path, leaf):
    written, meant = {"scaled_fp8": torch.tensor([], dtype=E4M3)}, dict(model.state_dict())
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "relative" not in name and name != "shared.weight":
            scale = tensor.abs().max() / torch.finfo(E4M3).max
            codes = (tensor / scale).to(E4M3)
            written |= {name: codes, f"{name.removesuffix('weight')}{leaf}": scale}
            meant[name] = codes.float() * scale
        else:
            written[name] = tensor
    scaled = UMT5EncoderModel(model.config).eval()
    scaled.load_state_dict(meant)
    path = saved(written, tmp_path)
    for mesh_result in (encoded(path, Mesh.single()), *run_as_threads({"tensor": 2}, lambda mesh: encoded(path, mesh))):
        assert torch.allclose(mesh_result, expected(scaled, pieces), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spiece_model": None}, "has no tokenizer inside.*beside it"),
        ({"spiece_model": torch.zeros(9, dtype=torch.uint8)}, "tokenizer inside cannot be read"),
        ({"encoder.final_layer_norm.weight": None}, "lacks encoder.final_layer_norm.weight"),
        ({"encoder.final_layer_norm.weight": torch.zeros(7)}, r"is \(7,\) and should be \(64,\)"),
        ({"decoder.final_layer_norm.weight": torch.zeros(7)}, "has unknown decoder"),
        (
            {"encoder.block.0.layer.0.SelfAttention.q.weight_scale": torch.ones(64)},
            r"SelfAttention\.q\.weight_scale scales a weight in 8 bits, but that is F32",
        ),
        (
            {"encoder.block.0.layer.0.SelfAttention.q.comfy_quant": torch.tensor([*b'{"format":"nvfp4"}']).byte()},
            r"SelfAttention\.q is marked as nvfp4, which is not available",
        ),
        (
            {"encoder.block.0.layer.0.SelfAttention.q.weight": torch.ones(64, 64, dtype=torch.int32)},
            r"SelfAttention\.q\.weight is I32\)",
        ),
        (
            {"model.encoder.final_layer_norm.weight": torch.zeros(64)},
            r"has encoder\.final_layer_norm\.weight and model\.encoder\.final_layer_norm\.weight, which are one",
        ),
    ],
)
def test_other_files_are_refused_by_what_is_wrong(tensors, tmp_path, change, words):
    changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    with pytest.raises(Refused, match=words):
        load(saved(changed, tmp_path), Mesh.single())


def test_a_pipeline_takes_the_file_as_its_text_encoder(tensors, tmp_path):
    path = saved(tensors, tmp_path)
    assert "spiece_model" in load_file(path)
    pipeline = Pipeline.load(
        ModelSettings(model="random:wan", text_encoder=str(path)), mesh=Mesh.single(), progress=ignore_progress
    )
    assert pipeline.encode_text(PROMPT, progress=ignore_progress).embedding.shape == (1, 512, 64)


def test_a_folder_of_a_variant_in_shards_without_an_index_is_what_was_saved(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="50KB", variant="fp16")
    [index] = tmp_path.glob("*.index.*")
    index.unlink()
    assert len(list(tmp_path.glob("*.fp16-*.safetensors"))) > 2
    loaded, ids = load_umt5(tmp_path, dtype=torch.float32, group=None).eval(), torch.tensor([[3, 7, 5, 1]])
    assert loaded.state_dict().keys() == model.state_dict().keys() and not any(p.is_meta for p in loaded.parameters())
    with torch.inference_mode():
        assert torch.equal(loaded(ids).last_hidden_state, model(ids).last_hidden_state)
    next(tmp_path.glob("*-00002-of-*")).unlink()
    with pytest.raises(Refused, match=r"model\.fp16-00002-of-\d+\.safetensors is missing"):
        load_umt5(tmp_path, dtype=torch.float32, group=None)
