"""What `test_ranks` shows for the first families, for those that came after: N ranks equal one, and one the bare class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import ChromaPipeline, QwenImagePipeline

from runtime.families import FAMILIES
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning
from tests.bare import bare_model, plain_euler
from tests.kinds import FEW, KINDS, LIMIT, MANY, compare
from tests.ranks import (
    FIRST,
    TABLE,
    VIDEOS,
    Case,
    relative_error,
    run_as_threads,
    run_cases_as_processes,
    run_on_one,
    sample_request,
)

UNEVEN_LIMIT = 3e-6
"""For three replicas and the like: float32 alone is 1.4e-6 off float64 in these models, and each batch has its own rounding."""
AGAINST_DIFFUSERS = 1e-6
NAMES = ("zimage", "flux2", "chroma", "sd3", "qwen-2511", "lumina2")


@pytest.mark.parametrize("degrees", FEW, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_kind_alone_equals_one_rank(name, degrees):
    compare(name, {"": TABLE["uneven tokens"]}, degrees)


def test_a_prompt_of_one_token_leaves_no_rank_without_text():
    """As an empty one is for Lumina 2."""
    compare("lumina2", {"": {"latent": (1, 16, 4, 6), "prompts": (5, 1)}}, {"ring": 2})


@pytest.mark.full
@pytest.mark.parametrize("degrees", [*FEW, *MANY], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_product_of_kinds_equals_one_rank(name, degrees):
    rows = TABLE | {"one token": {"latent": (3, 16, 2, 2), "prompts": (1, 1), "cfg": 1.0}}
    compare(name, rows, degrees, LIMIT if degrees in FEW else UNEVEN_LIMIT)


@pytest.mark.full
def test_processes_equal_one_rank(tmp_path):
    cases = [
        Case(**row, model=f"random:{name}", steps=2, degrees={kind: 2})
        for name in NAMES
        for kind in KINDS
        for row in TABLE.values()
    ]
    for results, reference in zip(run_cases_as_processes(cases, tmp_path), run_on_one(cases), strict=True):
        assert max(relative_error(result, reference) for result in results) < LIMIT


REFERENCE = torch.randn(1, 16, 1, 4, 8, generator=torch.Generator().manual_seed(5))
"""In the VAE's space."""


def sample_with_reference(case: Case, mesh: Mesh, method: str = "") -> torch.Tensor:
    """The latent of a case whose positive prompt has a reference beside it."""
    request, reference = sample_request(case), {"references": (REFERENCE,), "reference_method": method}
    positive = tuple(each.model_copy(update=reference) for each in request.positive)
    pipeline = Pipeline.load(request.model, mesh=mesh, progress=ignore_progress)
    return pipeline.sample(request.model_copy(update={"positive": positive}), progress=ignore_progress)


@pytest.mark.parametrize("degrees", [{"ring": 2, "tensor": 2}, {"cfg": 2, "ulysses": 2}], ids=str)
def test_a_reference_of_qwen_image_edit_2511_has_no_noise_on_any_rank(degrees):
    """Its tokens are modulated for timestep 0, wherever they are dealt to."""
    case = Case(model="random:qwen-2511", latent=(1, 16, 1, 8, 8), prompts=(5, 9), degrees=degrees)
    alone, family = sample_with_reference(case, Mesh.single()), FAMILIES["qwen-2511"]
    model, form = bare_model(family), family.latent
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (form.mean, form.std))
    reference = QwenImagePipeline._pack_latents((REFERENCE - mean) / std, 1, 16, 4, 8)

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        beside = prompt.embedding.shape[1] == case.prompts[0]
        tokens = QwenImagePipeline._pack_latents(x, 1, 16, 8, 8)
        output = model(
            hidden_states=torch.cat([tokens, reference], dim=1) if beside else tokens,
            encoder_hidden_states=prompt.embedding,
            encoder_hidden_states_mask=prompt.attention_mask,
            timestep=sigma.expand(1),
            img_shapes=[[(1, 4, 4), (1, 2, 4)]] if beside else [[(1, 4, 4)]],
            return_dict=False,
        )[0]
        return QwenImagePipeline._unpack_latents(output[:, :16], 64, 64, vae_scale_factor=8)

    assert relative_error(alone, plain_euler(case, family, velocity)) < 2 * AGAINST_DIFFUSERS
    for result in run_as_threads(degrees, lambda mesh: sample_with_reference(case, mesh)):
        assert relative_error(result, alone) < LIMIT


@pytest.mark.parametrize("degrees", [{}, {"ring": 2, "tensor": 2}], ids=str)
def test_the_method_of_a_conditioning_stands_for_the_mark_of_2511(degrees):
    """Files of it lack that where others than ComfyUI made them; its templates name the method."""

    def samples(model: str, method: str) -> list[torch.Tensor]:
        case = Case(model=f"random:{model}", latent=(1, 16, 1, 8, 8), prompts=(5, 9), degrees=degrees, steps=2)
        return run_as_threads(degrees, lambda mesh: sample_with_reference(case, mesh, method))

    clean, plain = (samples(model, "") for model in ("qwen-2511", "qwen"))
    assert relative_error(clean[0], plain[0]) > 1e-3
    for told, meant in (("index_timestep_zero", clean), ("index", plain)):
        for model in ("qwen-2511", "qwen"):
            assert all(map(torch.equal, samples(model, told), meant))


Velocity = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]


def zimage(model: torch.nn.Module) -> Velocity:
    """As ZImagePipeline calls it."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch = len(x)
        prompts = list(prompt.embedding.expand(batch, -1, -1))
        output = model(list(x.unsqueeze(2)), (1 - sigma).expand(batch), prompts, return_dict=False)[0]
        return -torch.stack(output).squeeze(2)

    return velocity


def flux2(model: torch.nn.Module) -> Velocity:
    """As Flux2Pipeline calls it, with prompts filled up as ComfyUI does."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, _, rows, columns = x.shape
        places = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns), torch.arange(1))
        output = model(
            hidden_states=x.flatten(2).transpose(1, 2),
            encoder_hidden_states=torch.nn.functional.pad(
                prompt.embedding, (0, 0, 512 - prompt.embedding.shape[1], 0)
            ).expand(batch, -1, -1),
            timestep=sigma.expand(batch),
            guidance=torch.full((batch,), 3.5),
            img_ids=places,
            txt_ids=torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(512)),
            return_dict=False,
        )[0]
        return output.transpose(1, 2).unflatten(2, (rows, columns))

    return velocity


def chroma(model: torch.nn.Module) -> Velocity:
    """As ChromaPipeline calls it, without masks."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        batch, channels, high, wide = x.shape
        places = torch.cartesian_prod(torch.arange(1), torch.arange(high // 2), torch.arange(wide // 2))
        output = model(
            hidden_states=ChromaPipeline._pack_latents(x, batch, channels, high, wide),
            encoder_hidden_states=prompt.embedding.expand(batch, -1, -1),
            timestep=sigma.expand(batch),
            img_ids=places,
            txt_ids=torch.zeros(prompt.embedding.shape[1], 3),
            return_dict=False,
        )[0]
        return ChromaPipeline._unpack_latents(output, high * 8, wide * 8, vae_scale_factor=8)

    return velocity


def sd3(model: torch.nn.Module) -> Velocity:
    """As StableDiffusion3Pipeline calls it."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        fields = (prompt.embedding.expand(len(x), -1, -1), prompt.pooled.expand(len(x), -1))
        return model(x, *fields, (sigma * 1000).expand(len(x)), return_dict=False)[0]

    return velocity


def lumina2(model: torch.nn.Module) -> Velocity:
    """As Lumina2Pipeline calls it."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt: Conditioning) -> torch.Tensor:
        prompts = prompt.embedding.expand(len(x), -1, -1)
        return -model(x, (1 - sigma).expand(len(x)), prompts, torch.ones(prompts.shape[:2]).int(), return_dict=False)[0]

    return velocity


CALLS = {"zimage": zimage, "flux2": flux2, "chroma": chroma, "sd3": sd3, "lumina2": lumina2}


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("latent", [(1, 16, 8, 8), (3, 16, 4, 12)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_one_rank_equals_an_euler_loop_over_the_diffusers_class(name, latent, cfg):
    family = FAMILIES[name]
    latent = (latent[0], family.latent.channels, *latent[2:])
    case = Case(model=f"random:{name}", latent=latent, cfg=cfg, prompts=(5, 9))
    [result] = run_on_one([case])
    error = relative_error(result, plain_euler(case, family, CALLS[name](bare_model(family))))
    print(f"relative error {error:.2e}")
    assert error < AGAINST_DIFFUSERS


def test_every_family_is_run_over_ranks_here_or_with_the_first_ones():
    assert {*FIRST, *NAMES, *VIDEOS} == set(FAMILIES)
