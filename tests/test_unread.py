"""Each key that a CONDITIONING of ComfyUI can carry, before each family: read, refused by name, or told of. None is dropped."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.families.spec import FamilySpec
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import ModelSettings, SampleSettings
from runtime.unread import reads_guidance
from tests.stock import comfyui_path

FLUX = {"flux", "flux-fill", "flux-control"}
WAN_PICTURE = {"wan-i2v", "wan2.2-i2v"}
READ = {
    "pooled": {*FLUX, "flux-schnell", "sd3"},
    "attention_mask": {"qwen", "qwen-2511", "ltx", "ltx-0.9.5", "hunyuan-1.5"},
    "second_embedding": {"hunyuan-1.5"},
    "guidance": {*FLUX, "flux2"},
    "references": {"flux", "flux-schnell", "qwen", "qwen-2511", "flux2"},
    "concat_latent": {"flux-fill", "flux-control", "hunyuan-1.5", *WAN_PICTURE},
    "concat_mask": {"flux-fill", "hunyuan-1.5"},
    "concat_latent concat_mask": {"flux-fill", "hunyuan-1.5", *WAN_PICTURE},
    "clip_vision clip_vision_last": {"wan-i2v", "hunyuan-1.5"},
    "frame_rate": {"ltx", "ltx-0.9.5"},
}
"""Which families ComfyUI's own classes give a field to, and a model that uses it."""
TOLD = {"guidance", "reference_method"}
ENCODERS_OWN = {"pooled", "attention_mask"}
"""What an encoder says, asked or not: ComfyUI's CLIP Text Encode gives it to every model."""
NOT_TAKEN = {("chroma", "guidance"), ("zimage", "attention_mask"), ("lumina2", "attention_mask")}
"""What ComfyUI's class reads, and this one cannot."""
CELLS = [(family, field) for family in FAMILIES for field in [*READ, "reference_method"]]


@cache
def pipeline(family: str) -> Pipeline:
    return Pipeline.load(ModelSettings(model=f"random:{family}"), mesh=Mesh.single(), progress=ignore_progress)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def latent_of(family: FamilySpec) -> tuple[int, ...]:
    return (1, family.latent.channels, *([2] if family.latent.dims == 3 else []), 4, 4)


def values(family: FamilySpec, tokens: int) -> dict[str, object]:
    """Something for each field, of the widths that the family works with, or of any."""
    shape, config = latent_of(family), family.tiny
    still = (*shape[:-3], 1, *shape[-2:]) if family.latent.dims == 3 else shape
    mask = torch.zeros(1, 1, *shape[2:])
    mask[..., :2] = 1.0
    said = drawn(1, 9, config[family.vision_width] if family.vision_width else 8)
    return {
        "pooled": drawn(1, config[family.pooled_width] if family.pooled_width else 8),
        "attention_mask": (torch.arange(tokens) < tokens - 2).long()[None],
        "second_embedding": drawn(1, 3, config[family.second_text_width] if family.second_text_width else 8),
        "guidance": 9.0,
        "references": (drawn(*still),),
        "reference_method": family.references[-1] if family.references else "index",
        "concat_latent": drawn(*shape),
        "concat_mask": mask,
        "clip_vision": said,
        "clip_vision_last": said,
        "frame_rate": 8.0,
    }


def sampled(family: str, options: dict[str, object]) -> tuple[torch.Tensor, list[str]]:
    """The latent after a step, and what was told."""
    spec, told = FAMILIES[family], []
    tokens = spec.text_length if spec.picture_tokens else 6
    given = Conditioning(embedding=drawn(1, tokens, spec.tiny[spec.text_width]), **options)
    request = Sample(
        job="j",
        model=ModelSettings(model=f"random:{family}"),
        settings=SampleSettings(steps=1, cfg=1.0, seed=3),
        positive=(given,),
        latent=torch.zeros(latent_of(spec)),
    )
    progress = lambda *_, notice="", **others: told.append(notice)  # noqa: E731
    return pipeline(family).sample(request, progress=progress), told


@cache
def plain(family: str) -> torch.Tensor:
    return sampled(family, {})[0]


def outcome(family: str, field: str) -> str:
    """What becomes of a field: it is "read" where the latent is another one with it."""
    spec = FAMILIES[family]
    tokens = spec.text_length if spec.picture_tokens else 6
    given = {name: values(spec, tokens)[name] for name in field.split()}
    try:
        latent, told = sampled(family, given)
    except Refused as refusal:
        assert re.search(r": (remove|use|encode|connect|disconnect) ", str(refusal)), "no way out"
        return "refused"
    if not torch.equal(latent, plain(family)):
        return "read"
    return "told" if any(line.startswith((field, "reference_latents_method")) for line in told) else "nothing"


@pytest.mark.parametrize(("family", "field"), CELLS)
def test_what_a_conditioning_carries_is_read_refused_or_told_of(family, field):
    found = outcome(family, field)
    if (family, field) in NOT_TAKEN:
        assert found == "refused"
    elif family in READ.get(field, ()):
        assert found == "read"
    elif field in TOLD:
        assert found == "told"
    else:
        assert found == ("nothing" if field in ENCODERS_OWN else "refused")


def test_a_klein_is_told_no_guidance():
    family = FAMILIES["flux2"]
    assert reads_guidance(family, family.tiny) and not reads_guidance(family, {**family.tiny, "guidance_embeds": False})


SAMPLERS_OWN = {
    "noise", "device", "seed", "cross_attn", "cross_attn_controlnet", "latent_image", "denoise_mask", "latent_shapes", "noise_concat",
    "sigmas", "model_type",
}  # fmt: skip
"""What ComfyUI's sampler gives to its classes itself, and what stands before the options of an entry."""
SETS, READS = r"conditioning_set_values\((?:[^()]|\([^()]*\))*", r"""kwargs(?:\.get\(|\[)["'](\w+)["']"""
CARRIED = {
    "pooled_output", "attention_mask", "conditioning_byt5small", "guidance", "reference_latents", "reference_latents_method",
    "concat_latent_image", "concat_mask", "clip_vision_output", "frame_rate", "mask", "mask_strength", "set_area_to_bounds",
    "strength", "area", "start_percent", "end_percent", "default",
}  # fmt: skip
"""The keys that go over to the sidecar, where a family reads them or not as above, or where the sampler itself does."""


@pytest.mark.comfy
def test_every_other_key_that_comfyui_knows_is_refused_by_name_or_told_of(pack):
    """Those that its nodes set, and those that its classes of models ask for."""
    comfy = comfyui_path()
    models = set(re.findall(READS, (comfy / "comfy" / "model_base.py").read_text()))
    sources = [*comfy.glob("comfy_extras/*.py"), comfy / "nodes.py", comfy / "comfy" / "hooks.py"]
    calls = [call for path in sources for call in re.findall(SETS, path.read_text())]
    nodes = {key for call in calls for key in re.findall(r"""["'](\w+)["']\s*:""", call)}
    assert {"guidance", "control_video", "audio_embed", "start_percent"} <= nodes and "frame_rate" in models
    for key in sorted((nodes | models) - SAMPLERS_OWN - CARRIED):
        carried = [[torch.zeros(1, 4, 8), {key: 1.0}]]
        try:
            pack.convert.to_conditioning(carried, "positive")
        except ValueError as refusal:
            assert key in str(refusal)
        else:
            assert key in pack.convert.without_effect(carried, "positive"), key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_without_a_token_works_or_is_refused(family):
    spec = FAMILIES[family]
    for shape in ((1, 0), (0, 6)):
        request = Conditioning(embedding=torch.zeros(*shape, spec.tiny[spec.text_width]))
        if shape[0] and spec.text_fill:
            continue
        with pytest.raises(Refused, match=r"no token: connect a text encoder"):
            pipeline(family)._reader.read(request, torch.zeros(latent_of(spec)), None)
