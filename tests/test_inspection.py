"""What lies at a path is told apart, and what cannot be used is refused by name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.tiny_shapes.export import to_comfy_transformer

CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 64, "num_layers": 3, "text_dim": 4096,
    "freq_dim": 256, "in_channels": 16, "out_channels": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> diffusers.WanTransformer3DModel:
    return diffusers.WanTransformer3DModel(**CONFIG)


@pytest.fixture(scope="module")
def original(model) -> dict[str, torch.Tensor]:
    """The model's tensors under ComfyUI's names."""
    return to_comfy_transformer(model.state_dict())


PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "net.", "transformer.")


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)


def test_all_layouts_of_a_file_give_the_configuration_of_the_model(tmp_path, model, original):
    layouts = {
        "comfyui": original,
        **{prefix: {f"{prefix}{name}": tensor for name, tensor in original.items()} for prefix in PREFIXES},
        "diffusers": model.state_dict(),
    }
    for name, tensors in layouts.items():
        facts = inspect_model(saved(tmp_path / f"{name}.safetensors", tensors))
        assert (facts.family, facts.heads, facts.head_dim, facts.layers) == ("wan", 2, 128, 3)
        assert all(facts.config[key] == value for key, value in CONFIG.items())
        assert set(facts.sources[0].names) == set(model.state_dict())


def test_other_models_of_an_all_in_one_checkpoint_are_left_alone(tmp_path, model, original):
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}
    facts = inspect_model(saved(tmp_path / "all.safetensors", {**tensors, "vae.conv1.weight": torch.zeros(2)}))
    assert set(facts.sources[0].names) == set(model.state_dict())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("blocks.0.self_attn.q.bias", "blocks.0.attn1.to_q.bias"),
        ("model.diffusion_model.blocks.0.self_attn.q.bias", "blocks.0.self_attn.q.bias"),
        ("model.diffusion_model.blocks.0.self_attn.q.bias", "blocks.0.attn1.to_q.bias"),
        ("model.diffusion_model.blocks.0.self_attn.q.bias", "diffusion_model.blocks.0.self_attn.q.bias"),
    ],
)
def test_a_tensor_that_is_there_under_two_names_is_refused_with_both(tmp_path, original, first, second):
    prefix = first.removesuffix("blocks.0.self_attn.q.bias")
    tensors = {f"{prefix}{name}": tensor for name, tensor in original.items()} | {second: torch.zeros(256)}
    with pytest.raises(Refused) as refusal:
        inspect_model(saved(tmp_path / "twice.safetensors", tensors))
    said = [
        f"twice.safetensors has {one} and {other}, which are one" for one, other in ((first, second), (second, first))
    ]
    assert any(words in str(refusal.value) for words in said), str(refusal.value)


def test_a_diffusers_folder_gives_its_parts(tmp_path, model):
    model.save_pretrained(tmp_path / "transformer", max_shard_size="5MB")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    (tmp_path / "vae").mkdir()
    facts = inspect_model(str(tmp_path))
    assert len(facts.sources) > 1
    assert {name for source in facts.sources for name in source.names} == set(model.state_dict())
    assert (facts.vae, facts.text_encoders) == (tmp_path / "vae", ())
    assert facts.config["patch_size"] == (1, 2, 2)
    assert inspect_model(str(tmp_path / "transformer")).config == facts.config
    (tmp_path / "transformer_2").mkdir()
    assert inspect_model(str(tmp_path)).transformer_2 == tmp_path / "transformer_2"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", "boundary_ratio": 7.5}))
    with pytest.raises(Refused, match=r"boundary_ratio 7\.5, no part of 1"):
        inspect_model(str(tmp_path))


def header(length: int, content: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", length) + content + data


TWICE = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16],"shape":[4]}}'
APART = (
    b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}'
)
SHARED = (
    b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[12,24]},"b":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
    b'"c":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}'
)
ENTRY = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"once upon a time there was a model", "text file"),
        (b"<!DOCTYPE html><html>not found</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b"PK\x03\x04 zipped", "pickle"),
        (b"", "not a .safetensors file"),
        (header(1 << 40, ENTRY), "not a .safetensors file"),
        (header(90_000_000, ENTRY), "cut short"),
        (header(7, b"[1,2,3]"), "not a table"),
        (header(7, b"{{{{{{{"), "not JSON"),
        (header(len(ENTRY), ENTRY, b"\0" * 8), "cut short"),
        (header(len(ENTRY), ENTRY.replace(b"[4]", b"[5]"), b"\0" * 16), "damaged"),
        (header(len(ENTRY), ENTRY.replace(b"[4]", b"-44"), b"\0" * 16), "damaged"),
        (header(len(ENTRY), ENTRY.replace(b"F32", b"F16"), b"\0" * 16), "damaged"),
        (header(len(ENTRY), ENTRY.replace(b"F32", b"F00"), b"\0" * 16), "damaged"),
        (header(len(ENTRY) + 1, ENTRY.replace(b"F32", b"BOOL"), b"\0" * 16), "damaged"),
        (header(len(ENTRY) + 2, ENTRY.replace(b'"F32"', b'["F32"]'), b"\0" * 16), "damaged"),
        (header(2 * len(ENTRY) - 1, ENTRY[:-1] + b"," + ENTRY[1:], b"\0" * 16), "header has 'a' more than once"),
        (header(len(TWICE), TWICE, b"\0" * 16), "header has 'shape' more than once"),
        (header(len(APART), APART, b"\0" * 32), "are 8 bytes between its tensors 'a' and 'b' that are of neither"),
        (header(len(SHARED), SHARED, b"\0" * 24), "tensors 'b' and 'a' share bytes"),
        (header(len(ENTRY), ENTRY, b"\0" * 16), "no architecture that is available"),
        (header(2, b"{}"), "no tensors"),
    ],
)
def test_a_file_that_is_not_a_model_is_refused_with_what_it_is(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(Refused) as refusal:
        inspect_model(str(path))
    assert words in str(refusal.value) and str(path) in str(refusal.value), str(refusal.value)


def test_a_header_that_would_take_memory_is_not_taken_apart(tmp_path):
    path, content = tmp_path / "model.safetensors", b'{"a":[' + b"[]," * (2 << 20) + b"0]}"
    path.write_bytes(header(len(content), content))
    with pytest.raises(Refused, match="its header is no table of tensors"):
        inspect_model(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vace_patch_embedding.weight": (2,)}, "Wan VACE"),
        ({"control_adapter.conv.weight": (2,)}, "Camera"),
        ({"casual_audio_encoder.encoder.final_linear.weight": (2,)}, "S2V"),
        ({"face_adapter.fuser_blocks.0.k_norm.weight": (2,)}, "Animate"),
        (
            {"patch_embedding.weight": (256, 48, 1, 2, 2)},
            "48 input and 16 output channels that does not read CLIP vision",
        ),
        ({"patch_embedding.weight": (256, 100, 1, 2, 2), "head.head.weight": (192, 256)}, "100 input and 48 output"),
        ({"head.head.weight": None}, "lacks proj_out.weight"),
    ],
)
def test_relatives_are_refused_by_name(tmp_path, original, change, words):
    tensors = {name: tensor for name, tensor in original.items() if change.get(name, ()) is not None}
    tensors.update({name: torch.zeros(shape) for name, shape in change.items() if shape})
    with pytest.raises(Refused) as refusal:
        inspect_model(saved(tmp_path / "relative.safetensors", tensors))
    assert words in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.ckpt", "pickle"),
        ("model.pt", "pickle"),
        ("model.gguf", "not a .gguf file"),
        ("model.txt", "not a .safetensors"),
        ("model-00001-of-00003.safetensors", r"part 1 of 3 of a model: choose the folder of all its parts"),
        ("model-00002-of-00003.fp16.safetensors", r"part 2 of 3 of a model"),
        ("my-wan-take-1-of-3.safetensors", r"not a \.safetensors file"),
        ("model-00001-of-00001.safetensors", r"not a \.safetensors file"),
    ],
)
def test_other_kinds_of_file_are_not_opened(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(Refused, match=words):
        inspect_model(str(tmp_path / name))


def test_a_folder_of_files_is_refused_with_their_names(tmp_path):
    for name in ("b.gguf", "a.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(Refused, match=r"or one of its files: a\.safetensors, b\.gguf$"):
        inspect_model(str(tmp_path))


def test_missing_files_folders_and_families_are_refused(tmp_path):
    for model, words in (
        (str(tmp_path / "none.safetensors"), "no such file"),
        (str(tmp_path), "no model_index.json"),
        ("random:flux3", "there are: wan"),
    ):
        with pytest.raises(Refused, match=words):
            inspect_model(model)
    (tmp_path / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    with pytest.raises(Refused, match=r"SanaPipeline.*no family here"):
        inspect_model(str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(Refused, match=r"config.json is missing"):
        inspect_model(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["x" * 5000, f"{'x' * 300}.safetensors", "a\0b", "\ud800.safetensors", "random:\0", "/dev/null/x"]
)
def test_names_that_no_file_can_have_are_refused_in_a_line_that_can_be_shown(model):
    with pytest.raises(Refused, match=r"no such file|no family") as refusal:
        inspect_model(model)
    assert len(str(refusal.value).encode()) < 500


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    def locked(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("runtime.inspection.read_header", locked)
    with pytest.raises(Refused, match=r"model.safetensors cannot be read .*Permission denied.*: let this user read it"):
        inspect_model(str(tmp_path / "model.safetensors"))


def test_a_folder_of_two_models_is_refused_with_what_each_file_says(tmp_path, model):
    def refusal() -> str:
        with pytest.raises(Refused) as raised:
            inspect_model(str(tmp_path))
        return str(raised.value)

    model.save_pretrained(tmp_path / "transformer")
    index, config = tmp_path / "model_index.json", tmp_path / "transformer" / "config.json"
    index.write_text(json.dumps({"_class_name": "FluxPipeline"}))
    assert (
        f"{index} says that this is a FluxPipeline, but {config} says WanTransformer3DModel, which is Wan" in refusal()
    )
    part = ["diffusers", "FluxTransformer2DModel"]
    index.write_text(json.dumps({"_class_name": "WanPipeline", "transformer": part}))
    assert "says that the transformer is a FluxTransformer2DModel, but " in refusal()
    index.write_text(json.dumps({"_class_name": "FluxPipeline", "transformer": part}))
    flux = {**FAMILIES["flux"].tiny, "_class_name": "FluxTransformer2DModel"}
    config.write_text(json.dumps(flux))
    assert "says FluxTransformer2DModel, but the weights lack" in refusal() and "they are those of Wan" in refusal()


def test_pickled_weights_in_a_folder_are_not_opened(tmp_path, model):
    model.save_config(tmp_path)
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(Refused, match=r"missing.*pickle"):
        inspect_model(str(tmp_path))


def test_planning_needs_no_torch():
    modules = "runtime.plan, runtime.inspection, runtime.machine, runtime.families"
    code = f"import sys, {modules}; print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
