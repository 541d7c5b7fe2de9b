"""Text encoders from ComfyUI's single files give what ComfyUI's own CLIP of the family gives, whole and cut over ranks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceTrainer

from runtime.encoders.kinds import CLASSES, blocks_of
from runtime.encoders.prompt_encoder import PromptEncoder
from runtime.encoders.prompts import weighted_parts
from runtime.encoders.text import TextEncoder
from runtime.encoders.text_file import load_encoder
from runtime.encoders.text_loras import text_names
from runtime.encoders.tokens import Tokenizer
from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.families.texts import JOINED_WIDTH, TextUse
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.parts import text_parts_of
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from runtime.text_files import find_encoders, tokenizer_of
from tests.ranks import run_as_threads
from tests.stock import ask_comfyui, comfyui_path, relative_error

LIMIT = 1e-5
WIDGETS = ("text_encoder", "text_encoder_2", "text_encoder_3")
T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2}
CLIP = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "num_hidden_layers": 3}
QWEN = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "num_hidden_layers": 3,
}  # fmt: skip
CASES = {
    "flux": {"clip": "flux:flux_clip", "tokenizer": "flux:FluxTokenizer", "sizes": {"clip_l": CLIP, "t5xxl": T5}},
    "chroma": {"clip": "pixart_t5:pixart_te", "tokenizer": "pixart_t5:PixArtTokenizer", "sizes": {"t5xxl": T5}},
    "ltx": {"clip": "lt:ltxv_te", "tokenizer": "lt:LTXVT5Tokenizer", "sizes": {"t5xxl": T5}},
    "sd3": {
        "clip": "sd3_clip:sd3_clip", "arguments": {"t5": False}, "tokenizer": "sd3_clip:SD3Tokenizer",
        "sizes": {"clip_l": CLIP, "clip_g": CLIP | {"num_hidden_layers": 32}},
    },
    "lumina2": {
        "clip": "lumina2:te", "tokenizer": "lumina2:LuminaTokenizer", "pieces": ["spiece_model"],
        "sizes": {"gemma2_2b": QWEN | {"vocab_size": 120}},
    },
    "wan": {
        "clip": "wan:te", "tokenizer": "wan:WanT5Tokenizer", "pieces": ["spiece_model"],
        "sizes": {"umt5xxl": T5 | {"vocab_size": 120}},
    },
    "zimage": {"clip": "z_image:te", "tokenizer": "z_image:ZImageTokenizer", "sizes": {"qwen3_4b": QWEN}},
    "qwen": {"clip": "qwen_image:te", "tokenizer": "qwen_image:QwenImageTokenizer", "sizes": {"qwen25_7b": QWEN}},
}  # fmt: skip
"""By family: what ComfyUI's loader of its type takes, and small sizes."""
PROMPTS = (
    "A red circle, on a (white:1.3) background ((of (stone) and:0.5) sand)",
    "",
    "a cat \\(sitting\\) on a mat: (one (two) \n three:x) ) four (",
    "an owl and the moon over a quiet lake with small boats, " * 9 + "(the end:0.7)",
    "<|im_start|>system\nDraw.<|im_end|>\n<|im_start|>user\na tree<|im_end|>",
)


# Against ComfyUI ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Files of every encoder, and what ComfyUI makes of the prompts."""
    folder = tmp_path_factory.mktemp("texts")
    cases = [{**case, "prompts": PROMPTS, "files": str(folder / f"{family} ")} for family, case in CASES.items()]
    return folder, ask_comfyui(folder, texts=cases, inputs={"spiece_model": small_tokenizer()})


def small_tokenizer() -> torch.Tensor:
    """The model of one as files have it inside, with the numbers that Gemma's has for what stands around a text."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([*PROMPTS, "the quick brown fox jumps over the lazy dog"] * 9), model_writer=model,
        vocab_size=90, model_type="unigram", pad_id=0, eos_id=1, bos_id=2, unk_id=3, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8)


@pytest.mark.comfy
@pytest.mark.parametrize("family", CASES)
def test_conditioning_and_names_of_loras_are_those_of_comfyui(stock, family):
    folder, results = stock
    encoder = check_conditioning(family, CASES[family], folder, results, f"texts.{list(CASES).index(family)}")
    check_lora_names(encoder.model, json.loads(bytes(results[f"texts.{list(CASES).index(family)}.layers"].tolist())))


@pytest.mark.full
@pytest.mark.comfy
def test_conditioning_of_all_three_encoders_is_that_of_comfyui(tmp_path):
    """T5 as wide as it is published: the tokens of the two CLIPs are filled up to that."""
    sizes = {**CASES["sd3"]["sizes"], "t5xxl": T5 | {"d_model": JOINED_WIDTH}}
    case = {**CASES["sd3"], "arguments": {"t5": True, "dtype_t5": None}, "sizes": sizes}
    results = ask_comfyui(tmp_path, texts=[{**case, "prompts": PROMPTS, "files": str(tmp_path / "sd3 ")}])
    check_conditioning("sd3", case, tmp_path, results, "texts.0")


def check_conditioning(family: str, case: dict, folder: Path, results: dict, of_case: str) -> TextEncoder:
    """Each prompt is encoded as ComfyUI has done it; the encoder that did."""
    files = [str(folder / f"{family} {kind}.safetensors") for kind in reversed(case["sizes"])]
    parts = dict(zip(WIDGETS, files, strict=False))
    encoder = encoder_of(ModelSettings(model=f"random:{family}", tokenizers=str(comfyui_path() / "comfy"), **parts))
    for number, prompt in enumerate(PROMPTS):
        made = encoder.encode(prompt, progress=ignore_progress)
        told = {"tokens": made.embedding, "pooled": made.pooled, "mask": made.attention_mask}
        wanted = {key: results.get(f"{of_case}.{number}.{key}") for key in told}
        assert {key for key in told if told[key] is None} == {key for key in wanted if wanted[key] is None}
        for key in wanted:
            assert wanted[key] is None or relative_error(told[key].float(), wanted[key].float()) < LIMIT, (number, key)
    return encoder


def check_lora_names(model: torch.nn.ModuleDict, table: dict[str, str]) -> None:
    """Each key that ComfyUI knows for a layer leads to that layer."""
    names = text_names(tuple(model), {name: each.shape for name, each in model.named_parameters()})
    left_out = ("visual", "text_projection", "logit_scale")
    table = {
        key: to for key, to in table.items() if key.startswith(("lora_te", "text_encoder")) and to[-7:] == ".weight"
    }
    table = {key: to for key, to in table.items() if not any(each in to for each in left_out)}
    assert len(table) > 20
    for key, to in table.items():
        kind, _, layer = to.partition(".transformer.")
        inner = layer.removeprefix("text_model.").removeprefix("model.")
        assert [target.name.replace(".text_model.", ".") for target in names.find(key)] == [f"{kind}.{inner}"], key


def encoder_of(settings: ModelSettings) -> TextEncoder:
    parts = text_parts_of(settings, inspect_model(settings.model))
    return TextEncoder.load(parts, dtype=torch.float32, device=torch.device("cpu"))


# Files --------------------------------------------------------------------------------------------------------------

SHAPES = {
    "t5xxl": {
        "shared.weight": (40, 32), "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, 4),
        "encoder.block.0.layer.0.SelfAttention.q.weight": (64, 32), "encoder.block.0.layer.1.DenseReluDense.wi_0.weight": (64, 32),
        "encoder.block.1.layer.0.SelfAttention.q.weight": (64, 32),
    },
    "clip_l": {
        "embeddings.token_embedding.weight": (49408, 64), "embeddings.position_embedding.weight": (77, 64),
        "encoder.layers.0.mlp.fc1.weight": (96, 64),
    },
    "gemma2_2b": {
        "embed_tokens.weight": (40, 32), "layers.0.mlp.gate_proj.weight": (512, 32),
        "layers.0.self_attn.q_proj.weight": (1024, 32), "layers.0.self_attn.k_proj.weight": (512, 32),
    },
    "qwen3_4b": {
        "embed_tokens.weight": (40, 32), "layers.0.mlp.gate_proj.weight": (256, 32),
        "layers.0.self_attn.q_proj.weight": (512, 32), "layers.0.self_attn.k_proj.weight": (256, 32),
    },
}  # fmt: skip
SHAPES["qwen25_7b"] = SHAPES["qwen3_4b"]
OUTER = {"clip_l": "text_model.", "qwen3_4b": "model.", "qwen25_7b": "model.", "gemma2_2b": "model."}
PACKAGES = {
    "t5xxl": "text_encoders/t5_tokenizer",
    "clip_l": "sd1_tokenizer",
    "qwen3_4b": "text_encoders/qwen25_tokenizer",
}


def small(kind: str) -> torch.nn.Module:
    """The class in a small size, with random weights."""
    torch.manual_seed(1)
    made = CLASSES[kind]
    model = made.model_class(made.config_from(SHAPES[kind]))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5 if weight.ndim > 1 else 1.0)
    return model


def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    """Its weights as ComfyUI's files have them."""
    outer, weights = OUTER.get(kind, ""), small(kind).state_dict()
    tied = () if outer else ("encoder.embed_tokens.weight",)
    names = {name: f"{outer}{name.removeprefix(outer)}" for name in weights if name not in tied}
    return {written: weights[name].clone() for name, written in names.items()}


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def encoded(path: Path, kind: str, mesh: Mesh, **use: object) -> torch.Tensor:
    """What a file makes of a few numbers, some of which count more."""
    model = load_encoder(find_encoders(path)[kind], dtype=torch.float32, group=mesh.group("tensor"))
    words = Tokenizer(lambda text: [3 + ord(each) % 30 for each in text], words=40, padding=0, end=1)
    reader = PromptEncoder(TextUse(kind, **use), words)
    prompt = reader.read("some (words:1.4)")
    with torch.inference_mode():
        return reader.encode(prompt, model.eval(), device=torch.device("cpu")).tokens


@pytest.mark.parametrize("kind", ["t5xxl", "clip_l", "gemma2_2b", "qwen3_4b", "qwen25_7b"])
def test_ranks_that_share_an_encoder_give_what_one_gives(kind, tmp_path):
    path = saved(tmp_path / "encoder.safetensors", tensors_of(kind))
    whole = encoded(path, kind, Mesh.single(), length=24, masked=True)
    assert whole.shape[:2] == (1, 24) and whole.std() > 0.1
    for degree in (2, 8):  # which is more than there are heads
        for part in run_as_threads({"tensor": degree}, lambda mesh: encoded(path, kind, mesh, length=24, masked=True)):
            assert relative_error(part, whole) < LIMIT


@pytest.mark.parametrize("kind", ["t5xxl", "clip_l", "gemma2_2b", "qwen3_4b"])
def test_no_rank_holds_more_than_its_part_of_the_matrices_of_an_encoder(kind, tmp_path):
    path = saved(tmp_path / "encoder.safetensors", tensors_of(kind))

    def numbers(mesh: Mesh) -> int:
        model = load_encoder(find_encoders(path)[kind], dtype=torch.float32, group=mesh.group("tensor"))
        return sum(each.numel() for name, each in model.named_parameters() if each.ndim > 1 and "position" not in name)

    whole = numbers(Mesh.single())
    assert run_as_threads({"tensor": 2}, numbers) == [whole // 2] * 2


def test_scaled_weights_mean_codes_times_scale(tmp_path):
    plain, scaled = tensors_of("qwen3_4b"), {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in list(plain.items()):
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            plain[name], layer = codes.float() * scale, name.removesuffix("weight")
            scaled |= {name: codes, f"{layer}scale_weight": scale, f"{layer}scale_input": scale.clone()}
    files = [saved(tmp_path / "plain.safetensors", plain), saved(tmp_path / "fp8.safetensors", {**plain, **scaled})]
    meant, made = (encoded(path, "qwen3_4b", Mesh.single()) for path in files)
    assert relative_error(made, meant) < 1e-6


def test_an_all_in_one_checkpoint_brings_its_encoders(tmp_path):
    transformer = inspect_model("random:flux").shapes
    tensors = {f"model.diffusion_model.{name}": torch.zeros(shape) for name, shape in transformer.items()}
    for kind in ("clip_l", "t5xxl"):
        tensors |= {f"text_encoders.{kind}.transformer.{name}": tensor for name, tensor in tensors_of(kind).items()}
        tensors |= {f"text_encoders.{kind}.logit_scale": torch.ones(())}
        (tmp_path / "comfy" / PACKAGES[kind]).mkdir(parents=True)
    path = saved(tmp_path / "all.safetensors", tensors)
    facts = inspect_model(str(path))
    assert set(facts.sources[0].names) == set(transformer)
    parts = text_parts_of(ModelSettings(model=str(path), tokenizers=str(tmp_path / "comfy")), facts)
    assert [part.use.kind for part in parts] == ["clip_l", "t5xxl"] and {part.file.path for part in parts} == {path}
    assert [part.tokenizer for part in parts] == [tmp_path / "comfy" / PACKAGES[part.use.kind] for part in parts]
    alone = saved(tmp_path / "t5.safetensors", tensors_of("t5xxl"))
    assert torch.equal(encoded(path, "t5xxl", Mesh.single()), encoded(alone, "t5xxl", Mesh.single()))


@pytest.mark.parametrize("kind", ["t5xxl", "clip_l", "gemma2_2b"])
def test_a_folder_means_what_a_file_of_it_means(kind, tmp_path):
    small(kind).save_pretrained(tmp_path / "text_encoder_2", max_shard_size="100KB")
    (tmp_path / "tokenizer_2").mkdir()
    [file] = find_encoders(tmp_path / "text_encoder_2").values()
    assert (file.kind, tokenizer_of(file, "")) == (kind, tmp_path / "tokenizer_2")
    alone = saved(tmp_path / "encoder.safetensors", tensors_of(kind))
    assert torch.equal(*(encoded(path, kind, Mesh.single()) for path in (file.path, alone)))


def test_the_half_of_clip_that_sees_is_left_out(tmp_path):
    sees = {"vision_model.embeddings.class_embedding": torch.ones(64), "visual_projection.weight": torch.ones(64, 64)}
    both = saved(tmp_path / "both.safetensors", {**tensors_of("clip_l"), **sees})
    alone = saved(tmp_path / "alone.safetensors", tensors_of("clip_l"))
    assert torch.equal(*(encoded(path, "clip_l", Mesh.single()) for path in (both, alone)))


PUBLISHED = {
    "clip_l": ((49408, 768), 3072, 12, {"num_attention_heads": 12}),
    "clip_g": ((49408, 1280), 5120, 32, {"num_attention_heads": 20, "hidden_act": "gelu"}),
    "t5xxl": ((32128, 4096), 10240, 24, {"num_heads": 64, "d_kv": 64}),
    "umt5xxl": ((256384, 4096), 10240, 24, {"num_heads": 64, "d_kv": 64}),
    "gemma2_2b": ((256000, 2304), 9216, 26, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
    "qwen3_4b": ((151936, 2560), 9728, 36, {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}),
    "qwen25_7b": ((152064, 3584), 18944, 28, {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}),
}
"""Words and width, the inside of the feed-forward part, layers, and what else the published configurations say."""


@pytest.mark.parametrize("kind", CLASSES)
def test_the_published_sizes_follow_from_the_shapes(kind):
    words, hidden, layers, told = PUBLISHED[kind]
    width, heads = words[1], told.get("num_attention_heads", 64)
    places = {
        "shared": words, "embed_tokens": words, "embeddings.token_embedding": words, "embeddings.position_embedding": (77, width),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": (32, 64), "text_projection": (width, width),
        "encoder.block.0.layer.0.SelfAttention.q": (4096, width), "encoder.block.0.layer.1.DenseReluDense.wi_0": (hidden, width),
        "layers.0.self_attn.q_proj": (heads * told.get("head_dim", 0), width),
        "layers.0.self_attn.k_proj": (told.get("num_key_value_heads", 0) * told.get("head_dim", 0), width),
        "layers.0.mlp.gate_proj": (hidden, width), "encoder.layers.0.mlp.fc1": (hidden, width),
    }  # fmt: skip
    own = {"t5xxl": "encoder.block", "umt5xxl": "encoder.block", "clip_l": "encoder.layers", "clip_g": "encoder.layers"}
    shapes = {
        f"{name}.weight": shape for name, shape in places.items() if not re.match(r"(encoder\.)?(layers|block)", name)
    }
    shapes |= {f"{name}.weight": shape for name, shape in places.items() if name.startswith(own.get(kind, "layers"))}
    shapes |= {f"{own.get(kind, 'layers')}.{layer}.norm.weight": (width,) for layer in range(layers)}
    config = CLASSES[kind].config_from(shapes)
    with torch.device("meta"):
        model = CLASSES[kind].model_class(config)
    assert (config.vocab_size, config.hidden_size, len(blocks_of(model, kind))) == (*words, layers)
    assert {key: getattr(config, key) for key in told} == told


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("t5xxl", {"encoder.final_layer_norm.weight": None}, "lacks encoder.final_layer_norm.weight"),
        ("clip_l", {"text_model.encoder.layers.0.mlp.fc2.bias": torch.zeros(7)}, r"is \(7,\) and should be \(64,\)"),
        ("qwen3_4b", {"model.layers.0.mlp.gate_proj.weight": None}, "refuses it .KeyError: 'layers.0.mlp.gate_proj"),
        ("qwen3_4b", {"model.norm.weight": torch.zeros(32, dtype=torch.uint8)}, "model.norm.weight is U8.*bf16 or fp8 file"),
        ("qwen25_7b", {"model.of.another": torch.zeros(1)}, "has unknown of.another"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_what_is_wrong(kind, change, words, tmp_path):
    tensors = {name: tensor for name, tensor in {**tensors_of(kind), **change}.items() if tensor is not None}
    with pytest.raises(Refused, match=words):
        encoded(saved(tmp_path / "encoder.safetensors", tensors), kind, Mesh.single())


def test_what_is_missing_or_of_another_family_is_told_with_a_way_out(tmp_path):
    t5, clip, qwen = (
        saved(tmp_path / f"{kind}.safetensors", tensors_of(kind)) for kind in ("t5xxl", "clip_l", "qwen3_4b")
    )
    other = saved(tmp_path / "other.safetensors", {"some.weight": torch.zeros(1)})
    (tmp_path / "sd1_tokenizer").mkdir()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(t5.read_bytes()[:-100])
    for family, files, words in (
        ("flux", (), "random:flux comes without a text encoder. .*DualCLIPLoader.*clip_l and t5xxl files or"),
        ("flux", (t5,), "without the text encoder CLIP-L. .*choose clip_l files or"),
        ("flux", (t5, t5), "t5xxl.safetensors and .* are both T5: choose one of each kind"),
        ("flux", (t5, qwen), "qwen3_4b.safetensors is Qwen3, but Flux.1 dev or Kontext takes CLIP-L and T5"),
        ("flux", (clip, t5), r"T5. has no tokenizer inside or beside it.*t5_tokenizer.*COMFYUI_PATH"),
        ("wan", (t5,), "is T5, but Wan .* takes UMT5: .*choose umt5_xxl files or the text_encoder folder"),
        ("zimage", (other,), "no text encoder that is read: it has 1 tensors such as some.weight; looked for .*Qwen3"),
        ("zimage", (tmp_path / "model.gguf",), "not a .safetensors file"),
        ("zimage", (tmp_path / "model.bin",), "is a pickle, which can run code"),
        ("zimage", (tmp_path / "model-00002-of-00003.safetensors",), "part 2 of 3 of a model: choose the folder"),
        ("flux2", (), "Flux.2 dev or klein takes Mistral .dev. or Qwen3 .klein.: use a CLIP Loader"),
        ("chroma", (cut,), "cut short"),
    ):
        parts = dict(zip(WIDGETS, map(str, files), strict=False))
        with pytest.raises(Refused, match=words):
            text_parts_of(ModelSettings(model=f"random:{family}", **parts), inspect_model(f"random:{family}"))


# Prompts ------------------------------------------------------------------------------------------------------------


def test_weights_of_words_and_what_cannot_be_weighed():
    assert weighted_parts("a (b:1.5)(c) d") == [("a ", 1.0), ("b", 1.5), ("c", 1.1), (" d", 1.0)]
    assert weighted_parts("((a:2) b:0.5)") == [("a", 2.0), (" b", 0.5)]
    assert weighted_parts("a) (b) (:2)") == [("a) (b) (:2)", 1.0)]
    for text, words in (("(a:nan)", "no number"), ("(" * 99 + "a" + ")" * 99, "more than 64 parentheses")):
        with pytest.raises(Refused, match=words):
            weighted_parts(text)


def test_an_embedding_in_a_prompt_is_refused_without_a_word_of_the_prompt():
    reader = PromptEncoder(TextUse("t5xxl"), Tokenizer(lambda text: [3], words=40, padding=0, end=1))
    for text in ("embedding:secret", "a (embedding:secret:1.2)", "a\nembedding:secret"):
        with pytest.raises(Refused, match="use CLIP Text Encode") as refusal:
            reader.read(text)
        assert "secret" not in str(refusal.value)
    assert reader.read("an-embedding:x").rows == [[3, 1]]


def test_each_family_says_how_its_encoders_are_read():
    assert {family.name for family in FAMILIES.values() if not family.texts} == {"flux2", "hunyuan-1.5"}
