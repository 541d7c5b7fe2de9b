"""What `test_family_ranks` shows, for the families that make videos: N ranks equal one, and one the bare class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime.families import FAMILIES
from runtime.families.spec import FamilySpec
from runtime.families.wan import WAN
from runtime.protocol import Conditioning
from runtime.timesteps import TimestepWaves
from tests.bare import bare_model, plain_euler
from tests.kinds import FEW, MANY, compare
from tests.ranks import TABLE, VIDEOS, Case, relative_error, run_on_one

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


def wan_model(family: FamilySpec) -> torch.nn.Module:
    """The class with the timestep waves in ComfyUI's rounding, which is 2e-6 of the latent off by itself."""
    model = bare_model(family)
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


def wan_by_frames(model: torch.nn.Module) -> Velocity:
    """As WanImageToVideoPipeline calls TI2V: a timestep for each token, and no noise where the (empty) latent is kept."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, _, frames, height, width = x.shape
        levels = torch.linspace(0.5, 1.0, frames)
        mask = levels.view(1, 1, -1, 1, 1)
        timesteps = (levels * sigma * 1000).repeat_interleave(height * width // 4).expand(batch, -1)
        embedding = prompt.embedding.expand(batch, -1, -1)
        predicted = model(x * mask, timesteps, embedding, return_dict=False)[0]
        return (x - (x * mask - sigma * predicted) * mask) / sigma

    return velocity


CALLS = {
    "wan-i2v": (wan_of_pictures, (1, 16, 3, 6, 10), (2, 16, 2, 4, 4)),
    "wan2.2-i2v": (wan_of_pictures, (1, 16, 3, 6, 10), (2, 16, 2, 4, 4)),
    "wan2.2-ti2v": (wan_by_frames, (1, 48, 3, 6, 10), (2, 48, 2, 4, 4)),
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
    error = relative_error(result, plain_euler(case, family, CALLS[name][0](wan_model(family))))
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS
