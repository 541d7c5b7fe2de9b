"""What `test_family_ranks` shows, for the families that make videos: N ranks equal one, and one the bare class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLWan, LTXConditionPipeline, LTXPipeline

from runtime.encoders.rows import Rows
from runtime.encoders.vae import Autoencoder
from runtime.families import FAMILIES
from runtime.families.spec import FamilySpec
from runtime.families.wan import WAN
from runtime.families.wan_image import LATENT_22
from runtime.mesh import Mesh
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning
from runtime.timesteps import TimestepWaves
from tests.bare import bare_model, plain_euler
from tests.kinds import FEW, LIMIT, MANY, compare
from tests.ranks import TABLE, VIDEOS, Case, relative_error, run_as_threads, run_on_one

AGAINST_DIFFUSERS = 1e-6
UNEVEN = {"latent": (1, 16, 3, 5, 9), "prompts": (5, 8)}
"""Three frames with odd sides: 45 tokens."""
FEW_TOKENS = {"latent": (3, 16, 2, 2), "prompts": (1, 1), "cfg": 1.0}


@pytest.mark.parametrize("degrees", FEW, ids=str)
@pytest.mark.parametrize("name", VIDEOS)
def test_each_kind_alone_equals_one_rank(name, degrees):
    compare(name, {"": UNEVEN}, degrees)


@pytest.mark.full
@pytest.mark.parametrize("degrees", [*FEW, *MANY], ids=str)
@pytest.mark.parametrize("name", VIDEOS)
def test_every_product_of_kinds_equals_one_rank(name, degrees):
    compare(name, {**TABLE, "video": UNEVEN, "one token": FEW_TOKENS}, degrees)


Velocity = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]


def model_of(family: FamilySpec) -> torch.nn.Module:
    """The class; Wan's with the timestep waves in ComfyUI's rounding, which is 2e-6 of the latent off by itself."""
    model = bare_model(family)
    if family.transformer_class != WAN.transformer_class:
        return model
    model.condition_embedder.timesteps_proj = TimestepWaves(family.tiny["freq_dim"])
    return model


def wan_of_pictures(model: torch.nn.Module) -> Velocity:
    """As WanImageToVideoPipeline calls it."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, form = len(x), WAN.latent
        mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (form.mean, form.std))
        given = (1 - prompt.concat_mask).expand(batch, 4, -1, -1, -1)
        picture = ((prompt.concat_latent - mean) / std).expand(batch, -1, -1, -1, -1)
        vision = prompt.clip_vision
        return model(
            hidden_states=torch.cat([x, given, picture], dim=1),
            timestep=(sigma * 1000).expand(batch),
            encoder_hidden_states=prompt.embedding.expand(batch, -1, -1),
            encoder_hidden_states_image=None if vision is None else vision.expand(batch, -1, -1),
            return_dict=False,
        )[0]

    return velocity


def with_levels(predict: Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]) -> Velocity:
    """Where the (empty) latent is kept in part, the model sees it without noise; `predict` is given the sigma of each token."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        levels = torch.linspace(0.5, 1.0, x.shape[2])
        mask = levels.view(1, 1, -1, 1, 1)
        predicted = predict(x * mask, levels * sigma, prompt)
        return (x - (x * mask - sigma * predicted) * mask) / sigma

    return velocity


def wan_by_frames(model: torch.nn.Module) -> Velocity:
    """As WanImageToVideoPipeline calls TI2V."""

    def predict(x: torch.Tensor, sigmas: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, _, _, height, width = x.shape
        timesteps = (sigmas * 1000).repeat_interleave(height * width // 4).expand(batch, -1)
        return model(x, timesteps, prompt.embedding.expand(batch, -1, -1), return_dict=False)[0]

    return with_levels(predict)


def ltx(model: torch.nn.Module, *, causal: bool = False) -> Velocity:
    """As LTXPipeline calls it, or LTXConditionPipeline, at 25 frames in a second."""

    def predict(x: torch.Tensor, sigmas: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, _, *sizes = x.shape
        places = LTXConditionPipeline._scale_video_ids(LTXConditionPipeline._prepare_video_ids(batch, *sizes)).float()
        places[:, 0] *= 1.0 / 25
        where = {"video_coords": places} if causal else {"rope_interpolation_scale": (8 / 25, 32, 32)}
        output = model(
            hidden_states=LTXPipeline._pack_latents(x),
            encoder_hidden_states=prompt.embedding.expand(batch, -1, -1),
            timestep=(sigmas * 1000).repeat_interleave(sizes[1] * sizes[2]).expand(batch, -1),
            encoder_attention_mask=prompt.attention_mask.expand(batch, -1),
            **dict(zip(("num_frames", "height", "width"), sizes, strict=True)),
            **where,
            return_dict=False,
        )[0]
        return LTXPipeline._unpack_latents(output, *sizes)

    return with_levels(predict)


def hunyuan(model: torch.nn.Module) -> Velocity:
    """As HunyuanVideo15ImageToVideoPipeline calls it."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, form = len(x), FAMILIES["hunyuan-1.5"].latent
        picture = prompt.concat_latent / form.std[0]
        beside = (each.expand(batch, -1, -1, -1, -1) for each in (picture, 1 - prompt.concat_mask))
        texts = [each.expand(batch, -1, -1) for each in (prompt.embedding, prompt.second_embedding)]
        return model(
            hidden_states=torch.cat([x, *beside], dim=1),
            timestep=(sigma * 1000).expand(batch),
            encoder_hidden_states=texts[0],
            encoder_attention_mask=prompt.attention_mask.expand(batch, -1),
            encoder_hidden_states_2=texts[1],
            encoder_attention_mask_2=torch.ones(texts[1].shape[:2]),
            image_embeds=prompt.clip_vision_last.expand(batch, -1, -1),
            return_dict=False,
        )[0]

    return velocity


CALLS = {
    "wan-i2v": (wan_of_pictures, (1, 16, 3, 6, 10), (2, 16, 2, 4, 4)),
    "wan2.2-i2v": (wan_of_pictures, (1, 16, 3, 6, 10), (2, 16, 2, 4, 4)),
    "wan2.2-ti2v": (wan_by_frames, (1, 48, 3, 6, 10), (2, 48, 2, 4, 4)),
    "ltx": (ltx, (1, 128, 3, 5, 7), (2, 128, 2, 3, 4)),
    "ltx-0.9.5": (partial(ltx, causal=True), (1, 128, 3, 5, 7), (2, 128, 2, 3, 4)),
    "hunyuan-1.5": (hunyuan, (1, 32, 3, 5, 7), (2, 32, 2, 3, 4)),
}
"""How the class of a family is called, and latents for it."""


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "latent"), [(name, latent) for name, (_, *latents) in CALLS.items() for latent in latents]
)
def test_one_rank_equals_an_euler_loop_over_the_diffusers_class(name, latent, cfg):
    family = FAMILIES[name]
    case = Case(model=f"random:{name}", latent=latent, cfg=cfg, prompts=(5, 9))
    [result] = run_on_one([case])
    error = relative_error(result, plain_euler(case, family, CALLS[name][0](model_of(family))))
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS


def test_the_vae_of_ti2v_over_two_ranks_is_that_of_the_class():
    """Residual blocks and patches of pixels, which the VAE of Wan 2.1 does not have; in a small size."""
    sizes = {
        "base_dim": 16,
        "decoder_base_dim": 16,
        "z_dim": 48,
        "num_res_blocks": 1,
        "in_channels": 12,
        "out_channels": 12,
    }
    torch.manual_seed(0)
    bare = AutoencoderKLWan(**sizes, is_residual=True, patch_size=2).eval()
    latent, pixels = torch.randn(1, 48, 2, 6, 4), torch.rand(5, 96, 64, 3)
    with torch.no_grad():
        video = (bare.decode(latent, return_dict=False)[0][0].movedim(0, -1).clamp(-1, 1) + 1) / 2
        encoded = bare.encode(pixels.movedim(-1, 0)[None] * 2 - 1).latent_dist.mode()
    models = [copy.deepcopy(bare) for _ in range(2)]

    def run(mesh: Mesh) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows = Rows(mesh.group("ulysses"))
        coder = Autoencoder(models[mesh.rank], form=LATENT_22, rows=rows, device=torch.device("cpu"))
        return coder.decode(latent, progress=ignore_progress), coder.encode(pixels, progress=ignore_progress)

    (decoded, back), others = run_as_threads({"ulysses": 2}, run)
    assert others == (None, None)
    assert relative_error(decoded, video) < LIMIT and relative_error(back, encoded) < LIMIT
