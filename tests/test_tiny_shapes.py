"""The tiny trained model: its data, its files, and what it draws."""

import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from safetensors.torch import load_file

from runtime.tiny_shapes import MODEL_FOLDER
from runtime.tiny_shapes.autoencoder import (
    build_autoencoder,
    decode_clips,
    decode_pictures,
    encode_clips,
    encode_pictures,
    fold_statistics,
    picture_view,
)
from runtime.tiny_shapes.autoencoder_training import clip_batch, hold_picture_latents, picture_batch
from runtime.tiny_shapes.check import centre_of, inspect
from runtime.tiny_shapes.denoiser import build_transformer
from runtime.tiny_shapes.export import (
    export_comfy_transformer,
    export_comfy_vae,
    to_comfy_transformer,
    to_comfy_vae,
)
from runtime.tiny_shapes.scenes import (
    HELD_OUT,
    HELD_OUT_COMBINATIONS,
    MOTIONS,
    TRAINING_COMBINATIONS,
    Scene,
    all_combinations,
    draw,
    draw_clip,
    format_prompt,
    parse_prompt,
    random_scene,
)
from runtime.tiny_shapes.text import LENGTH, build_text_encoder, build_tokenizer, encode_prompts

needs_weights = pytest.mark.skipif(not (MODEL_FOLDER / "model_index.json").exists(), reason="no trained weights here")


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("blur", [0, 2])
def test_pixel_check_reads_drawn_scenes_back(noise: float, blur: int) -> None:
    random, wrong = np.random.default_rng(0), 0
    for index in range(192):
        scene = random_scene(random, moving=index % 3 == 0, combinations=tuple(all_combinations()))
        image = draw(scene, moment=random.random())
        for axis in (0, 1):
            image = sum(np.roll(image, shift, axis) for shift in range(-blur, blur + 1)) / (2 * blur + 1)
        image = np.clip(image + noise * random.standard_normal(image.shape), 0, 1)
        wrong += inspect(image) != scene.combination
    assert wrong <= 1


def test_pixel_check_refuses_an_empty_picture() -> None:
    with pytest.raises(ValueError, match="nothing stands out"):
        inspect(np.full((128, 128, 3), 0.5))


@pytest.mark.parametrize("motion", MOTIONS)
def test_drawn_clips_move_as_named(motion: str) -> None:
    clip = draw_clip(Scene("red", "cross", "white", motion=motion))
    way = np.array(centre_of(clip[-1])) - np.array(centre_of(clip[0]))
    assert np.allclose(way, 0.4 * np.array(MOTIONS[motion]), atol=0.02)


def test_prompts_name_their_scene() -> None:
    random = np.random.default_rng(0)
    for index in range(200):
        scene = random_scene(random, moving=index % 2 == 0)
        parsed = parse_prompt(format_prompt(scene, index))
        assert (*parsed.combination, parsed.position, parsed.motion) == (
            *scene.combination,
            scene.position,
            scene.motion,
        )


def test_held_out_prompts_are_outside_the_training_combinations() -> None:
    assert not set(HELD_OUT_COMBINATIONS) & set(TRAINING_COMBINATIONS)
    assert len(set(HELD_OUT)) == 40
    assert {parse_prompt(prompt).combination for prompt in HELD_OUT} <= set(HELD_OUT_COMBINATIONS)


def test_tokenizer_knows_words_punctuation_and_the_end() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("A red Circle, somewhere").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "red", "circle", ",", "<unk>", "</s>"]
    assert tokenizer("").input_ids == [1]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == LENGTH


def test_text_encoder_keeps_words_apart_and_padding_at_zero() -> None:
    hidden = encode_prompts(build_tokenizer(), build_text_encoder(), ["red", "blue", ""])
    red, blue = hidden[0, 0], hidden[1, 0]
    assert torch.cosine_similarity(red, blue, dim=0) < 0.6
    assert hidden[0, 2:].abs().max() == 0 and hidden[2, 1:].abs().max() == 0


def test_picture_view_equals_the_autoencoder_on_one_frame() -> None:
    torch.manual_seed(0)
    autoencoder = build_autoencoder()
    view, pixels = picture_view(autoencoder), picture_batch(np.random.default_rng(0), 2, 64)
    with torch.no_grad():
        latent = encode_clips(autoencoder, pixels)
        assert torch.allclose(encode_pictures(view, pixels), latent, atol=1e-5)
        decoded = decode_pictures(view, latent).clamp(-1, 1)
        assert torch.allclose(decoded, decode_clips(autoencoder, latent), atol=1e-5)


def test_folding_statistics_changes_latents_but_not_pictures() -> None:
    torch.manual_seed(0)
    autoencoder = build_autoencoder()
    pixels = picture_batch(np.random.default_rng(0), 4, 64)
    with torch.no_grad():
        latent = encode_clips(autoencoder, pixels)
        decoded = decode_clips(autoencoder, latent)
        fold_statistics(autoencoder, latent.mean(dim=(0, 2, 3, 4)), latent.std(dim=(0, 2, 3, 4)))
        folded = encode_clips(autoencoder, pixels)
        assert torch.allclose(decode_clips(autoencoder, folded), decoded, atol=1e-4)
    assert torch.allclose(folded.mean(dim=(0, 2, 3, 4)), torch.tensor(autoencoder.config.latents_mean), atol=1e-3)
    assert torch.allclose(folded.std(dim=(0, 2, 3, 4)), torch.tensor(autoencoder.config.latents_std), atol=1e-3)


@pytest.mark.parametrize(
    ("build", "export", "convert"),
    [
        (build_transformer, to_comfy_transformer, convert_wan_transformer_to_diffusers),
        (build_autoencoder, to_comfy_vae, convert_wan_vae_to_diffusers),
    ],
)
def test_exported_names_convert_back_to_the_same_weights(build, export, convert) -> None:
    expected = build().state_dict()
    exported = export(expected)
    assert len(exported) == len(expected)
    converted = convert(dict(exported))
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[key], expected[key]) for key in expected)


@needs_weights
def test_folder_is_small_and_in_bfloat16() -> None:
    files = [path for path in MODEL_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20 * 2**20
    for path in MODEL_FOLDER.rglob("*.safetensors"):
        assert {value.dtype for value in load_file(path).values()} == {torch.bfloat16}


@needs_weights
def test_exported_files_hold_the_weights_in_the_dtype_asked_for(tmp_path) -> None:
    export_comfy_transformer(tmp_path / "transformer.safetensors", torch.float16)
    export_comfy_vae(tmp_path / "vae.safetensors")
    transformer, vae = load_file(tmp_path / "transformer.safetensors"), load_file(tmp_path / "vae.safetensors")
    assert transformer["head.modulation"].dtype == torch.float16 and "blocks.0.self_attn.q.weight" in transformer
    assert vae["decoder.head.0.gamma"].dtype == torch.float32 and "conv1.weight" in vae


@needs_weights
def test_latents_of_scenes_have_the_stated_mean_and_deviation() -> None:
    from runtime.tiny_shapes.dataset import make_pictures
    from runtime.tiny_shapes.sampling import load_model

    latents = make_pictures(load_model().autoencoder, 96, seed=123).latents
    assert latents.mean(dim=(0, 2, 3, 4)).abs().max() < 0.25
    assert (latents.std(dim=(0, 2, 3, 4)) - 1).abs().max() < 0.25


@pytest.fixture(scope="module")
def held_out_verdicts() -> list:
    from runtime.tiny_shapes.evaluate import generate, judge
    from runtime.tiny_shapes.sampling import load_model

    prompts = list(HELD_OUT[::7])
    return [judge(prompt, one) for prompt, one in zip(prompts, generate(load_model(), prompts), strict=True)]


@needs_weights
def test_held_out_prompts_get_their_colour_background_and_place(held_out_verdicts) -> None:
    assert sum(verdict.colour and verdict.background and verdict.place for verdict in held_out_verdicts) >= 5


@needs_weights
def test_held_out_prompts_get_their_shape_too(held_out_verdicts) -> None:
    assert sum(verdict.right for verdict in held_out_verdicts) >= 5, held_out_verdicts


@needs_weights
def test_diffusers_pipeline_loads_the_folder_and_draws_the_prompt() -> None:
    from diffusers import WanPipeline

    from runtime.tiny_shapes.evaluate import judge

    pipeline = WanPipeline.from_pretrained(MODEL_FOLDER)
    pipeline.set_progress_bar_config(disable=True)
    prompt = "a blue circle on a white background"
    made = pipeline(
        prompt=prompt,
        negative_prompt="",
        height=128,
        width=128,
        num_frames=1,
        num_inference_steps=20,
        max_sequence_length=LENGTH,
        generator=torch.Generator().manual_seed(0),
    ).frames[0]
    assert judge(prompt, np.asarray(made)).right


def test_refining_time_leaves_the_latents_of_pictures_alone() -> None:
    torch.manual_seed(0)
    autoencoder = build_autoencoder()
    random = np.random.default_rng(0)
    pixels, clip = picture_batch(random, 2, 32), clip_batch(random, 1, 32)
    with torch.no_grad():
        still, moving = encode_clips(autoencoder, pixels), encode_clips(autoencoder, clip)
    hold_picture_latents(autoencoder)
    optimizer = torch.optim.Adam([p for p in autoencoder.parameters() if p.requires_grad], lr=1e-2)
    decode_clips(autoencoder, encode_clips(autoencoder, clip)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(encode_clips(autoencoder, pixels), still)
        assert not torch.allclose(encode_clips(autoencoder, clip), moving, atol=1e-3)
