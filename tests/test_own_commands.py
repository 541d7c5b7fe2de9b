"""The commands on a model without a family: what works through diffusers' own pipeline, and what is refused in whose words."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.__main__ import main
from runtime.commands import generate, verify
from runtime.loading import load_pipeline
from runtime.mesh import Mesh
from runtime.progress import ignore_progress
from runtime.protocol import Sample
from tests.own_pipelines import made
from tests.test_own_pipeline import CFG, PROMPTS, SEED, STEPS, own_pictures

PROMPT, NEGATIVE = PROMPTS
SIZE = ["--width", "48", "--height", "64"]
WORDS = [
    "--prompt",
    PROMPT,
    "--negative",
    NEGATIVE,
    "--steps",
    str(STEPS),
    "--cfg",
    str(CFG),
    "--seed",
    str(SEED),
    *SIZE,
]


class Here:
    """Does what a sidecar is asked in this process."""

    @classmethod
    @contextmanager
    def start(cls):
        yield cls()

    def _loaded(self, model):
        if not hasattr(self, "pipeline"):
            self.pipeline = load_pipeline(model, mesh=Mesh.single(), progress=ignore_progress)
        return self.pipeline

    def encode(self, model, text):
        return SimpleNamespace(
            conditioning=self._loaded(model).encode_text(text, progress=ignore_progress), seconds=0.0
        )

    def sample(self, model, **fields):
        request = Sample(job="j", model=model, **fields)
        return SimpleNamespace(latent=self.pipeline.sample(request, progress=ignore_progress), seconds=0.0)

    def decode(self, model, latent):
        return SimpleNamespace(images=self.pipeline.decode(latent, progress=ignore_progress), seconds=0.0)

    def memory(self):
        return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name in ("AuraFlow", "CogVideoX"):
        made(name).save_pretrained(path / name)
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def drawn(path: str) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image))[None]


def in_bytes(pictures: torch.Tensor) -> torch.Tensor:
    return (pictures * 255).round().byte()


def test_a_plan_says_once_that_the_memory_of_a_step_is_not_known(capsys, folder):
    assert main(["plan", "--model", str(folder / "AuraFlow")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "what a step works with beside them: not known" in lines
    assert sum(line.count("not known") for line in lines) == 1


def test_generate_draws_what_diffusers_draws(capsys, monkeypatch, folder):
    monkeypatch.setattr(generate, "own_sidecar", Here.start)
    assert main(["generate", "--model", str(folder / "AuraFlow"), "--out", "a.png", *WORDS, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["plan"].values()) == {1}
    expected = own_pictures("AuraFlow", folder / "AuraFlow", height=64, width=48)
    assert torch.equal(drawn(said["path"]), in_bytes(expected))


def test_generate_makes_a_video_of_the_frames_asked_for(monkeypatch, folder):
    monkeypatch.setattr(generate, "own_sidecar", Here.start)
    written = {}
    monkeypatch.setattr("runtime.commands.pictures.write", lambda images, path: written.update(images=images))
    monkeypatch.setattr("runtime.commands.pictures.check_path", lambda path, frames: None)
    assert main(["generate", "--model", str(folder / "CogVideoX"), "--out", "a.mp4", "--frames", "9", *WORDS]) == 0
    assert torch.equal(
        written["images"], own_pictures("CogVideoX", folder / "CogVideoX", height=64, width=48, num_frames=9)
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sampler", "dpmpp_2m"], "sampler_name dpmpp_2m: AuraFlowPipeline samples with its own scheduler"),
        (["--width", "50"], "width 50 is no multiple of 8"),
        (["--devices", "cpu:2"], "devices cpu:2"),
        (["--vae", "FOLDER/AuraFlow/vae"], "vae: AuraFlow has no family here"),
        (["--quant", "fp8"], "quant fp8"),
    ],
)
def test_generate_refuses_what_a_pipeline_does_not_take_before_it_starts_anything(
    capsys, monkeypatch, folder, words, says
):
    monkeypatch.setattr(generate, "own_sidecar", None)
    words = [word.replace("FOLDER", str(folder)) for word in words]
    assert main(["generate", "--model", str(folder / "AuraFlow"), "--out", "a.png", *WORDS, *words]) == 1
    assert says in capsys.readouterr().err


def test_verify_and_quantize_say_why_they_do_not_work_on_it(capsys, monkeypatch, folder):
    monkeypatch.setattr(verify, "own_sidecar", None)
    model = ["--model", str(folder / "AuraFlow")]
    why = "AuraFlow has no family here and runs on one rank through diffusers' own AuraFlowPipeline: "
    assert main(["verify", *model]) == 1
    assert why + "there is no plan to compare with one rank" in capsys.readouterr().err
    assert main(["quantize", *model, "--out", "a.safetensors"]) == 1
    assert why + "which of its Linears can be in 4 bits is not known" in capsys.readouterr().err


@pytest.mark.full
def test_generate_draws_the_same_in_a_sidecar(capsys, folder):
    assert main(["generate", "--model", str(folder / "AuraFlow"), "--out", "a.png", *WORDS]) == 0
    expected = own_pictures("AuraFlow", folder / "AuraFlow", height=64, width=48)
    assert torch.equal(drawn("a.png"), in_bytes(expected))
