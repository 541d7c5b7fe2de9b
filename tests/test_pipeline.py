"""The engine on one rank: loading, text, sampling and decoding, and what is refused on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import Cancelled, Refused
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import ModelSettings, SampleSettings
from runtime.tiny_shapes.autoencoder import build_autoencoder
from runtime.tiny_shapes.export import to_comfy_transformer, to_comfy_vae
from runtime.tiny_shapes.text import build_text_encoder, build_tokenizer

CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 64, "num_layers": 2, "text_dim": 4096,
    "freq_dim": 256, "in_channels": 16, "out_channels": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def transformer() -> diffusers.WanTransformer3DModel:
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(**CONFIG).eval()


@pytest.fixture(scope="module")
def autoencoder() -> diffusers.AutoencoderKLWan:
    torch.manual_seed(0)
    return build_autoencoder().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, transformer, autoencoder) -> Path:
    """A whole model as a diffusers folder, with random weights."""
    path = tmp_path_factory.mktemp("model")
    transformer.save_pretrained(path / "transformer", max_shard_size="5MB")
    autoencoder.save_pretrained(path / "vae")
    build_text_encoder().save_pretrained(path / "text_encoder")
    build_tokenizer().save_pretrained(path / "tokenizer")
    (path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    return path


@pytest.fixture(scope="module")
def pipeline(folder) -> Pipeline:
    return load(folder)


@pytest.fixture
def file(tmp_path, transformer) -> Callable[..., Path]:
    """Write the transformer as ComfyUI has it, with some tensors changed or (None) left out."""

    def write(**changes: torch.Tensor | None) -> Path:
        tensors = {**to_comfy_transformer(transformer.state_dict()), **changes}
        path = tmp_path / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, path)
        return path

    return write


def load(model: Path | str, *, progress=ignore_progress, **settings) -> Pipeline:
    return Pipeline.load(ModelSettings(model=str(model), **settings), mesh=Mesh.single(), progress=progress)


def model_of(pipeline: Pipeline) -> torch.nn.Module:
    return pipeline._predict._model


class Recorder:
    """A progress that keeps its calls, and cancels at one of them."""

    def __init__(self, cancel_at: int = 0) -> None:
        self.calls, self.previews, self.together, self._cancel_at = [], [], set(), cancel_at
        self.notices: list[str] = []

    def __call__(self, stage, step, total, *, preview=None, notice="", together=True) -> None:
        if notice:
            return self.notices.append(notice)
        self.calls.append((stage, step, total))
        self.previews.append(preview)
        self.together.add(together)
        if len(self.calls) == self._cancel_at:
            raise Cancelled


# Loading ------------------------------------------------------------------------------------------------------------


def test_folder_and_file_load_to_the_very_tensors_of_diffusers(folder, file, transformer):
    expected = {**transformer.state_dict(), **dict(transformer.named_buffers())}
    assert "rope.freqs_cos" in expected
    for path in (folder, folder / "transformer", file()):
        model = model_of(load(path))
        assert type(model) is diffusers.WanTransformer3DModel
        loaded = {**model.state_dict(), **dict(model.named_buffers())}
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_lower_precision_keeps_what_the_class_keeps_in_float32(file):
    model = model_of(load(file(), dtype="bf16"))
    kept = model._keep_in_fp32_modules
    for name, parameter in model.named_parameters():
        expected = torch.float32 if any(part in name.split(".") for part in kept) else torch.bfloat16
        assert parameter.dtype == expected, name
    assert model.rope.freqs_cos.dtype != torch.bfloat16


def test_loading_reports_the_same_steps_each_time_and_can_be_cancelled(file):
    path, recorder = file(), Recorder()
    load(path, progress=recorder)
    total = sum(tensor.nbytes for tensor in model_of(load(path)).state_dict().values())  # the file is float32 too
    assert recorder.calls[-1] == ("loading", total, total) and recorder.together == {True}
    assert len(recorder.calls) > 5
    with pytest.raises(Cancelled):
        load(path, progress=Recorder(cancel_at=3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks.1.ffn.2.bias": None}, "lacks 1 tensor of .*blocks.1.ffn.net.2.bias"),
        ({f"blocks.1.self_attn.{x}.weight": None for x in "qkvo"} | {"blocks.1.norm3.bias": None, "blocks.1.modulation": None},
         r"lacks 6 tensors of .* \.\.\."),
        ({"blocks.1.extra.weight": torch.zeros(2)}, "has unknown 1 tensor beside those of .*blocks.1.extra.weight"),
        ({"blocks.1.ffn.2.bias": torch.zeros(3)}, r"blocks.1.ffn.2.bias has shape \(3,\).* needs \(256,\)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(file, changes, words):
    with pytest.raises(Refused, match=words):
        load(file(**changes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text_encoder_2": "/x"}, "text_encoder_2 is set, but Wan .* is run with 1 text encoder here"),
        ({"text_encoder": "/x/umt5.safetensors"}, "CLIP Loader"),
        ({"vae": "/x/vae.safetensors"}, "no such VAE"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_before_a_weight_is_read(settings, words):
    recorder = Recorder()
    with pytest.raises(Refused, match=words):
        load("random:wan", progress=recorder, **settings)
    assert not recorder.calls


# Text ---------------------------------------------------------------------------------------------------------------


def test_text_is_zero_where_the_prompt_has_ended(pipeline):
    tokens = build_tokenizer()("a red circle on a blue background", return_tensors="pt")
    expected = build_text_encoder()(**tokens).last_hidden_state
    recorder = Recorder()
    embedding = pipeline.encode_text("a red circle on a blue background", progress=recorder).embedding
    length = tokens.input_ids.shape[1]
    assert embedding.shape == (1, 32, 4096) and embedding.dtype == torch.float32
    assert torch.allclose(embedding[:, :length], expected, atol=1e-5)
    assert not embedding[:, length:].any()
    assert {call[0] for call in recorder.calls} <= {"loading", "encoding text"} and recorder.together == {False}


def test_a_long_prompt_is_not_cut(pipeline):
    embedding = pipeline.encode_text("red " * 50, progress=ignore_progress).embedding
    assert embedding.shape == (1, 51, 4096) and embedding[0, -1].any()


def test_a_prompt_that_no_memory_would_hold_is_refused(pipeline):
    with pytest.raises(Refused, match=r"^the prompt has 60001 tokens: shorten it to 4096 or less$"):
        pipeline.encode_text("a " * 60000, progress=ignore_progress)


def test_encoding_can_be_cancelled_after_each_block_and_starts_anew(pipeline):
    pipeline.encode_text("red", progress=ignore_progress)
    whole = Recorder()
    expected = pipeline.encode_text("a long prompt", progress=whole).embedding
    blocks = len(pipeline._components.text_encoder.model["umt5xxl"].encoder.block)
    assert whole.calls == [("encoding text", step, blocks) for step in range(blocks + 1)]
    with pytest.raises(Cancelled):
        pipeline.encode_text("a long prompt", progress=Recorder(cancel_at=2))
    again = Recorder()
    assert torch.equal(pipeline.encode_text("a long prompt", progress=again).embedding, expected)
    assert again.calls == whole.calls


# Sampling -----------------------------------------------------------------------------------------------------------


def request(
    *, latent=(1, 16, 1, 4, 4), steps=3, cfg=5.0, preview="none", preview_decoders=(), width=4096, **settings
) -> Sample:
    latent = torch.zeros(latent) if isinstance(latent, tuple) else latent
    generator = torch.Generator().manual_seed(0)
    prompts = [Conditioning(embedding=torch.randn(1, 4, width, generator=generator)) for _ in range(2)]
    return Sample(
        job="test",
        model=ModelSettings(model="random:wan"),
        settings=SampleSettings(seed=1, steps=steps, cfg=cfg, **settings),
        positive=(prompts[0],),
        negative=(prompts[1],),
        latent=latent,
        preview=preview,
        preview_decoders=preview_decoders,
    )


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ((1, 16, 1, 4, 4), (1, 16, 1, 4, 4)),
        ((2, 16, 3, 5, 7), (2, 16, 3, 5, 7)),
        ((1, 16, 4, 6), (1, 16, 1, 4, 6)),
        ((2, 4, 4, 4), (2, 16, 1, 4, 4)),
    ],
)
def test_a_latent_comes_back_with_five_dims_as_from_ksampler(pipeline, given, returned):
    result = pipeline.sample(request(latent=given), progress=ignore_progress)
    assert tuple(result.shape) == returned and result.dtype == torch.float32 and result.isfinite().all()


def test_nothing_to_denoise_gives_the_latent_back(pipeline):
    latent = torch.randn(1, 16, 1, 4, 4)
    assert torch.equal(pipeline.sample(request(latent=latent, denoise=0.0), progress=ignore_progress), latent)


def test_each_step_is_reported_once_with_its_picture(pipeline):
    recorder = Recorder()
    pipeline.sample(request(steps=4, preview="latent2rgb", latent=(1, 16, 2, 4, 6)), progress=recorder)
    assert recorder.calls == [("sampling", step, 4) for step in range(1, 5)] and recorder.together == {True}
    assert all(preview.shape == (4, 6, 3) and preview.dtype == torch.uint8 for preview in recorder.previews)
    recorder = Recorder()
    pipeline.sample(request(), progress=recorder)
    assert recorder.previews == [None] * 3


def test_previews_that_cannot_be_drawn_as_wished_are_drawn_roughly_and_it_is_said_once(pipeline):
    recorder, decoders = Recorder(), ("/models/vae_approx/lighttaew2_1.pth",)
    pipeline.sample(request(preview="taesd", preview_decoders=decoders), progress=recorder)
    assert len(recorder.notices) == 1 and "convert lighttaew2_1.pth" in recorder.notices[0]
    assert all(preview.shape == (4, 4, 3) for preview in recorder.previews)


def test_cancel_ends_at_the_step_and_leaves_the_model_as_it_was(pipeline):
    expected = pipeline.sample(request(), progress=ignore_progress)
    recorder = Recorder(cancel_at=2)
    with pytest.raises(Cancelled):
        pipeline.sample(request(steps=9), progress=recorder)
    assert len(recorder.calls) == 2
    assert torch.equal(pipeline.sample(request(), progress=ignore_progress), expected)


def test_inputs_of_another_model_are_refused(pipeline):
    with pytest.raises(ValueError, match="4 channels"):
        pipeline.sample(request(latent=torch.ones(1, 4, 1, 4, 4)), progress=ignore_progress)
    with pytest.raises(Refused, match=r"\(1, 4, 768\).*4096"):
        pipeline.sample(request(width=768), progress=ignore_progress)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 16, 1, 2, 12500), "of 100000 x 16 pixels and 1 latent frames, .* end at 16384 x 16384 and 1024: use"),
        ((1, 16, 1, 2049, 2), "of 16 x 16392 pixels"),
        ((1, 16, 1025, 2, 2), "of 16 x 16 pixels and 1025 latent frames"),
    ],
)
def test_a_latent_beyond_the_models_positions_is_refused_before_it_runs(pipeline, shape, words):
    recorder = Recorder()
    with pytest.raises(Refused, match=words):
        pipeline.sample(request(latent=shape), progress=recorder)
    assert recorder.calls == []


def test_the_last_position_of_the_model_is_used(pipeline):
    assert pipeline.sample(request(latent=(1, 16, 1, 2, 2048), steps=1), progress=ignore_progress).isfinite().all()


# Decoding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16, 1, 4, 4), (2, 16, 1, 4, 6), (1, 16, 3, 4, 4)])
@torch.inference_mode()
def test_pictures_are_those_of_diffusers(pipeline, autoencoder, shape):
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = (autoencoder.decode(latent).sample.permute(0, 2, 3, 4, 1).flatten(0, 1) + 1) / 2
    pictures = pipeline.decode(latent, progress=ignore_progress)
    assert torch.allclose(pictures, expected.clamp(0, 1), atol=1e-5)
    if shape[2] == 1:
        assert torch.equal(pipeline.decode(latent[:, :, 0], progress=ignore_progress), pictures)


def test_decoding_reports_each_block_and_can_be_cancelled(pipeline):
    latent, recorder = torch.randn(2, 16, 2, 4, 4), Recorder()
    expected = pipeline.decode(latent, progress=recorder)
    decoding = [call for call in recorder.calls if call[0] == "decoding"]
    assert decoding == [("decoding", step, 16) for step in range(1, 17)] and recorder.together == {True}
    with pytest.raises(Cancelled):
        pipeline.decode(latent, progress=Recorder(cancel_at=5))
    assert torch.equal(pipeline.decode(latent, progress=ignore_progress), expected)


def test_a_latent_with_other_channels_is_refused(pipeline):
    with pytest.raises(Refused, match="decodes 16 channels"):
        pipeline.decode(torch.zeros(1, 4, 4, 4), progress=ignore_progress)


@pytest.mark.parametrize("names", [to_comfy_vae, dict], ids=["comfyui", "diffusers"])
def test_parts_may_come_from_elsewhere(file, folder, autoencoder, tmp_path, pipeline, names):
    vae = tmp_path / "vae.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in names(autoencoder.state_dict()).items()}, vae)
    mixed = load(file(), text_encoder=str(folder / "text_encoder"), vae=str(vae))
    latent = torch.randn(1, 16, 1, 4, 4)
    assert torch.equal(
        mixed.decode(latent, progress=ignore_progress), pipeline.decode(latent, progress=ignore_progress)
    )
    assert mixed.encode_text("a red circle", progress=ignore_progress).embedding.any()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("decoder.head.0.gamma", torch.tensor(8.0), "IndexError"),
        ("decoder.head.0.gamma", torch.zeros(1 << 20, 1, 1, 1), "size mismatch"),
        ("decoder.conv1.bias", torch.zeros(7), "size mismatch"),
        ("decoder.conv1.bias", None, "Missing key"),
        ("of.another.model", torch.zeros(1), "Unexpected key"),
    ],
)
def test_a_vae_file_that_does_not_fit_together_is_refused_by_its_name(autoencoder, tmp_path, name, tensor, words):
    tensors = to_comfy_vae(autoencoder.state_dict()) | {name: tensor}
    path = tmp_path / "vae.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items() if value is not None}, path)
    with pytest.raises(Refused, match=rf"(?s)vae.safetensors is .*{words}"):
        load("random:wan", vae=str(path)).decode(torch.zeros(1, 16, 1, 4, 4), progress=ignore_progress)


def test_a_transformer_alone_says_which_stock_nodes_to_use(file):
    alone = load(file())
    with pytest.raises(Refused, match="CLIP Text Encode"):
        alone.encode_text("a red circle", progress=ignore_progress)
    with pytest.raises(Refused, match="VAE Decode"):
        alone.decode(torch.zeros(1, 16, 1, 4, 4), progress=ignore_progress)


def without(folder: Path, copy: Path, name: str) -> Path:
    """A copy of a folder of weights that lacks one tensor."""
    shutil.copytree(folder, copy)
    [weights] = copy.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors[name]
    save_file(tensors, weights, metadata={"format": "pt"})
    return copy


def test_a_part_that_is_something_else_or_incomplete_is_refused(folder, tmp_path):
    latent = torch.zeros(1, 16, 1, 4, 4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"_class_name": "AutoencoderKL", "architectures": ["T5Model"]}')
    vae = without(folder / "vae", tmp_path / "vae", "decoder.conv_in.bias")
    text = without(folder / "text_encoder", tmp_path / "text_encoder", "encoder.final_layer_norm.weight")
    for path, words in (
        (tmp_path / "other", "another kind .AutoencoderKL"),
        (vae, "lacks decoder.conv_in.bias"),
        (tmp_path, "config.json is missing"),
    ):
        pipeline = load("random:wan", vae=str(path))
        with pytest.raises(Refused, match=words):
            pipeline.decode(latent, progress=ignore_progress)
    for path, words in ((tmp_path / "other", "T5Model"), (text, "lacks encoder.final_layer_norm.weight")):
        pipeline = load("random:wan", text_encoder=str(path))
        with pytest.raises(Refused, match=words):
            pipeline.encode_text("red", progress=ignore_progress)


def change(**values: object) -> Callable[[Path], None]:
    """Changes values of a JSON file."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(path: Path) -> None:
    """Loses the second half of a file, as a download that stopped."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = [
    ("text_encoder/model.safetensors", cut, "cut short"),
    ("text_encoder/model.safetensors", lambda path: path.write_text("nonsense " * 9), "but a text file"),
    ("text_encoder/model.safetensors", Path.unlink, "text_encoder/model.safetensors is missing"),
    ("vae/diffusion_pytorch_model.safetensors", Path.unlink, "vae/diffusion_pytorch_model.safetensors is missing"),
    ("text_encoder/config.json", change(d_ff=-1), "negative dimension"),
    ("text_encoder/config.json", change(d_ff=1), "has shape"),
    ("text_encoder/config.json", change(num_layers="two"), "num_layers"),
    ("text_encoder/config.json", change(num_layers=10**30), "num_layers is '1000"),
    ("text_encoder/config.json", change(num_layers=0), "has unknown encoder.block.0"),
    ("text_encoder/config.json", change(dense_act_fn="sine"), "refuses it .KeyError: 'sine'"),
    ("tokenizer/tokenizer.json", change(model={}), "holds no tokenizer"),
    ("tokenizer/tokenizer_config.json", change(model_max_length="long"), "holds no tokenizer"),
    ("tokenizer/tokenizer_config.json", change(pad_token="a word too many"), "words, but the encoder .* knows"),
    ("vae/diffusion_pytorch_model.safetensors", cut, "cut short"),
    ("vae/config.json", change(base_dim="eight"), "base_dim is 'eight'"),
    ("vae/config.json", change(dim_mult=[]), "refuses it"),
    ("vae/config.json", change(base_dim=7), "has shape"),
    ("vae/config.json", change(patch_size=0), "patch_size is '0'"),
    ("vae/config.json", change(scale_factor_spatial=[]), "scale_factor_spatial"),
    ("transformer/config.json", change(ffn_dim=-1), "ffn_dim is '-1'"),
    ("transformer/config.json", change(eps="small"), "eps is 'small'"),
    ("transformer/config.json", change(rope_max_seq_len=10**12), "rope_max_seq_len is"),
    ("transformer/config.json", change(num_layers=10**30), "num_layers is"),
    ("transformer/config.json", change(attention_head_dim=10**9), "no tensor is 2000000000 wide"),
    ("transformer/config.json", change(patch_size=3), "refuses it"),
    ("transformer/config.json", change(from_next_year=1), "unexpected keyword argument 'from_next_year'"),
]


@pytest.mark.parametrize(("file", "damage", "words"), DAMAGE)
def test_a_damaged_part_is_refused_by_the_name_of_its_file(folder, tmp_path, file, damage, words):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    damage(copy / file)
    with pytest.raises(Refused, match=f"(?s)(?=.*{words})(?=.*(ownload|use the two))") as refusal:
        damaged = load(copy)
        damaged.encode_text("red", progress=ignore_progress)
        damaged.decode(torch.zeros(1, 16, 1, 4, 4), progress=ignore_progress)
    assert str(copy / file.split("/")[0]) in str(refusal.value)
