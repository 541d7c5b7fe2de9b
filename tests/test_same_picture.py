"""Same seed, same settings, same latent: our engine on one rank, and stock UNETLoader + KSampler."""

from __future__ import annotations

from itertools import product

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import SAMPLER_NAMES, SCHEDULER_NAMES, ModelSettings, SampleSettings
from runtime.tiny_shapes.export import to_comfy_transformer
from tests.stock import ask_comfyui, relative_error

pytestmark = pytest.mark.comfy

LIMIT = 1e-5
CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 256, "num_layers": 2, "text_dim": 4096,
    "freq_dim": 256, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
"""Wan's smallest that stock ComfyUI recognises: it takes a head for 128 wide."""
SHAPES = {"even": (6, 8), "odd": (5, 7)}
PLAIN = {"cfg": 5.0, "batch_index": None, "denoise": 1.0, "seed": 123, "steps": 6}
GRID = [
    PLAIN | {"sampler_name": name, "scheduler": scheduler, "latent": f"empty-{batch}-{frames}-{size}", "cfg": cfg}
    for name, scheduler, batch, frames, size, cfg in product(
        SAMPLER_NAMES, SCHEDULER_NAMES, (1, 3), (1, 3), SHAPES, (1.0, 5.0)
    )
]
SOME = GRID[::5]
"""Each pair of sampler and scheduler three times, each time with other values of the rest."""
SPECIAL = [
    PLAIN | {"sampler_name": name, "scheduler": "simple"} | case
    for name in SAMPLER_NAMES
    for case in (
        {"latent": "picture", "denoise": 0.6},
        {"latent": "picture", "denoise": 0.0},
        {"latent": "picture", "batch_index": [2, 0], "denoise": 0.8},
        {"latent": "four-dims", "cfg": 1.0},
        {"latent": "four-dims", "denoise": 0.0},
        {"latent": "four-dims", "steps": 1},
        {"latent": "empty-1-1-odd", "cfg": 0.0},
    )
]


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INPUTS = {
    f"empty-{batch}-{frames}-{size}": torch.zeros(batch, 16, frames, *SHAPES[size])
    for batch, frames, size in product((1, 3), (1, 3), SHAPES)
} | {
    "picture": draw(2, 16, 1, 5, 7, seed=1),
    "four-dims": torch.zeros(1, 4, 5, 7),
    "positive": draw(1, 9, 4096, seed=2),
    "negative": draw(1, 5, 4096, seed=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Wan of random weights under the original names, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = diffusers.WanTransformer3DModel(**CONFIG)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    path = tmp_path_factory.mktemp("models") / "wan_random.safetensors"
    save_file(to_comfy_transformer(weights), path)
    return path


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    settings = ModelSettings(model=str(checkpoint), dtype="fp32")
    return Pipeline.load(settings, mesh=Mesh.single(torch.device("cpu")), progress=ignore_progress)


@pytest.fixture(scope="module")
def compare(checkpoint, pipeline, tmp_path_factory):
    """Runs cases on both sides and gives the relative error of each."""

    def run(cases: list[dict]) -> list[float]:
        both = {"model": str(checkpoint), "positive": "positive", "negative": "negative"}
        folder = tmp_path_factory.mktemp("stock")
        stock = ask_comfyui(folder, inputs=INPUTS, samples=[both | case for case in cases])
        offset = int(stock["step_seed_offset"])
        ours = [sample(pipeline, checkpoint, case, cpu_noise_offset=offset) for case in cases]
        return [relative_error(latent, stock[f"samples.{number}"]) for number, latent in enumerate(ours)]

    return run


def sample(pipeline, checkpoint, case, *, cpu_noise_offset):
    request = Sample(
        job="same-picture",
        model=ModelSettings(model=str(checkpoint), dtype="fp32"),
        settings=SampleSettings(**{name: case[name] for name in SampleSettings.model_fields}),
        positive=(Conditioning(embedding=INPUTS["positive"]),),
        negative=(Conditioning(embedding=INPUTS["negative"]),),
        latent=INPUTS[case["latent"]].clone(),
        batch_index=case["batch_index"] and tuple(case["batch_index"]),
        cpu_noise_offset=cpu_noise_offset,
    )
    return pipeline.sample(request, progress=ignore_progress)


def check(cases: list[dict], errors: list[float], capsys) -> None:
    figures = list(zip(errors, cases, strict=True))
    with capsys.disabled():
        for name in SAMPLER_NAMES:
            own = [(error, case) for error, case in figures if case["sampler_name"] == name]
            worst, case = max(own, key=lambda figure: figure[0])
            where = f"{case['scheduler']}, {case['latent']}, cfg {case['cfg']}, denoise {case['denoise']}"
            print(f"\n  {name}: {len(own)} latents, worst relative error {worst:.1e} ({where})", end="")
    assert not [figure for figure in figures if not figure[0] <= LIMIT]


@pytest.fixture(scope="module")
def errors(compare):
    """Of the cases below, from one run of ComfyUI."""
    return compare([*SOME, *SPECIAL])


def test_latent_is_ksamplers(errors, capsys):
    check(SOME, errors[: len(SOME)], capsys)


def test_latent_is_ksamplers_for_pictures_part_batches_and_other_shapes(errors, capsys):
    check(SPECIAL, errors[len(SOME) :], capsys)


@pytest.mark.full
def test_latent_is_ksamplers_over_the_whole_grid(compare, capsys):
    check(GRID, compare(GRID), capsys)
