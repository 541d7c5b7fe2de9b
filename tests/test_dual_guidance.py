"""Three prompts: the latent that SamplerCustomAdvanced gives with DualCFGGuider or PerpNegGuider."""

from __future__ import annotations

import pytest
import torch

from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import ModelSettings, SampleSettings
from tests.ranks import run_as_threads
from tests.stock import ask_comfyui, relative_error
from tests.test_same_picture import INPUTS, PLAIN, draw, random_model

SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.0]
PROMPTS = {
    "positive": draw(1, 9, 4096, seed=2),
    "middle": draw(1, 7, 4096, seed=4),
    "negative": draw(1, 5, 4096, seed=3),
}
CASES = [
    {"cfg": 6.0, "cfg_middle": 3.0, "style": "regular", "sampler_name": "euler"},
    {"cfg": 6.0, "cfg_middle": 1.0, "style": "regular", "sampler_name": "euler"},
    {"cfg": 1.0, "cfg_middle": 1.0, "style": "regular", "sampler_name": "euler"},
    {"cfg": 2.0, "cfg_middle": 3.0, "style": "nested", "sampler_name": "dpmpp_2m"},
    {"cfg": 1.5, "cfg_middle": 1.0, "style": "regular", "sampler_name": "euler_cfg_pp"},
    {"cfg": 6.0, "neg_scale": 1.5, "sampler_name": "euler"},
    {"cfg": 6.0, "neg_scale": 0.0, "sampler_name": "euler"},
    {"cfg": 1.0, "neg_scale": 0.0, "sampler_name": "euler"},
    {"cfg": 1.0, "neg_scale": 1.0, "sampler_name": "dpmpp_2m"},
    {"cfg": 1.5, "neg_scale": 0.0, "sampler_name": "euler_cfg_pp"},
]


def request_of(model: str, *, batch: int = 1, sampler_name: str = "euler", **scales: float) -> Sample:
    prompts = {side: (Conditioning(embedding=prompt),) for side, prompt in PROMPTS.items()}
    return Sample(
        job="test",
        model=ModelSettings(model=model, dtype="fp32"),
        settings=SampleSettings(**scales, sampler_name=sampler_name, seed=PLAIN["seed"]),
        latent=INPUTS["empty-1-1-odd"].repeat(batch, 1, 1, 1, 1),
        sigmas=torch.tensor(SIGMAS),
        **prompts,
    )


@pytest.mark.comfy
def test_three_prompts_give_the_latent_of_stock(tmp_path):
    model = random_model(tmp_path)
    sides = {side: side for side in PROMPTS}
    shared = PLAIN | sides | {"model": str(model.checkpoint), "sigmas": SIGMAS, "latent": "empty-1-1-odd"}
    stock = ask_comfyui(tmp_path, inputs=INPUTS | PROMPTS, samples=[shared | case for case in CASES])
    for number, case in enumerate(CASES):
        options = {name: value for name, value in case.items() if name != "style"}
        if case.get("style") == "nested":
            options["cfg"] *= case["cfg_middle"]
        result = model.pipeline.sample(request_of(str(model.checkpoint), **options), progress=ignore_progress)
        error = relative_error(result, stock[f"samples.{number}"])
        print(case, f"relative error {error:.1e}")
        assert error < 1e-5


@pytest.mark.parametrize(
    ("degrees", "guidance"),
    [
        ({"cfg": 2}, {"cfg_middle": 3.0}),
        ({"cfg": 2, "ulysses": 2}, {"cfg_middle": 3.0}),
        ({"cfg": 3}, {"cfg_middle": 3.0}),
        ({"cfg": 2}, {"neg_scale": 1.5}),
        ({"cfg": 3}, {"neg_scale": 1.5}),
        ({"data": 2, "cfg": 3}, {"neg_scale": 1.5, "batch": 2}),
    ],
    ids=str,
)
def test_ranks_that_share_three_branches_give_the_latent_of_one(degrees, guidance):
    request = request_of("random:wan", cfg=6.0, **guidance)

    def run(mesh: Mesh) -> torch.Tensor:
        return Pipeline.load(request.model, mesh=mesh, progress=ignore_progress).sample(
            request, progress=ignore_progress
        )

    reference = run(Mesh.single())
    for result in run_as_threads(degrees, run):
        assert (result - reference).norm() / reference.norm() < 2e-6


@pytest.mark.parametrize("given", [{"cfg_middle": 2.0}, {"middle": (Conditioning(embedding=PROMPTS["middle"]),)}])
def test_a_middle_prompt_and_its_scale_go_together(given):
    settings = SampleSettings(cfg_middle=given.pop("cfg_middle", None))
    positive = (Conditioning(embedding=PROMPTS["positive"]),)
    with pytest.raises(ValueError, match="give both or neither"):
        Sample(
            job="test",
            model=ModelSettings(model="random:wan"),
            settings=settings,
            positive=positive,
            latent=INPUTS["empty-1-1-odd"],
            **given,
        )


def test_guidance_is_of_one_kind():
    with pytest.raises(ValueError, match="disconnect either middle or empty_conditioning"):
        SampleSettings(cfg_middle=3.0, neg_scale=1.0)
