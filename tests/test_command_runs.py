"""Commands that run a model: verify and generate, each with a sidecar of its own."""

from __future__ import annotations

import json
import logging
import math
import re
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.__main__ import main
from runtime.commands import generate, pictures, verify
from runtime.commands.inputs import drawn_conditioning, empty_latent
from runtime.errors import Refused
from runtime.families import FAMILIES
from runtime.families.flux import FLUX
from runtime.families.wan import WAN
from runtime.inspection import MODEL_FOLDER, inspect_model
from runtime.tiny_shapes import check

PROMPT = "a red circle on a white background"
TRANSFORMER = MODEL_FOLDER / "transformer"
WEIGHTS = TRANSFORMER / "diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """Commands on a machine without a GPU, in an empty folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def answer(capsys) -> dict:
    """The one JSON object that was printed."""
    return json.loads(capsys.readouterr().out)


class Pretended:
    """Samples what it is told; `asked` are the requests."""

    def __init__(self, *latents: torch.Tensor) -> None:
        self.latents, self.asked = iter(latents), []

    def sample(self, model, **fields):
        self.asked.append((model, fields))
        return SimpleNamespace(latent=next(self.latents))

    @contextmanager
    def start(self):
        yield self


# verify


def test_verify_finds_a_ring_as_good_as_one_rank(capsys):
    assert main(["verify", "--model", "random:wan", "--devices", "cpu:2", "--ring", "2", "--steps", "2", "--json"]) == 0
    figures = answer(capsys)
    assert figures["ok"] and figures["family"] == "wan" and figures["plan"]["ring"] == 2
    assert 0 < figures["rel_err"] < 2e-6 < figures["tolerance"] and figures["max_abs"] > 0 and figures["psnr_db"] > 100


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_finds_every_family_cut_in_two_as_good_as_one_rank(capsys, family):
    assert main(["verify", "--model", f"random:{family}", "--devices", "cpu:2", "--tensor", "2", "--json"]) == 0
    figures = answer(capsys)
    assert figures["family"] == family and 0 < figures["rel_err"] < figures["tolerance"]


@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (1e-7, 0), (1e-4, 1), (float("nan"), 1)])
def test_verify_ends_with_1_over_the_tolerance(capsys, monkeypatch, error, status):
    one = torch.linspace(-1, 1, 64, dtype=torch.float64)
    pretended = Pretended(one, one * (1 + error))
    monkeypatch.setattr(verify, "own_sidecar", pretended.start)
    assert main(["verify", "--model", "random:wan", "--devices", "cpu:2", "--data", "2", "--json"]) == status
    figures = answer(capsys)
    assert figures["ok"] is (status == 0)
    assert figures["rel_err"] == (None if error != error else pytest.approx(error, rel=1e-3))
    (one_rank, _), (model, fields) = pretended.asked
    assert (one_rank.parallel.devices, model.parallel.devices) == ("cpu:1", "cpu:2")
    assert len(fields["latent"]) == 2  # one item for each replica


def test_verify_compares_a_quantised_model_with_the_unquantised(capsys, monkeypatch):
    one = torch.linspace(-1, 1, 64, dtype=torch.float64)
    pretended = Pretended(one, one, one * 1.1)
    monkeypatch.setattr(verify, "own_sidecar", pretended.start)
    words = ["verify", "--model", "random:wan", "--devices", "cpu:2", "--data", "2", "--quant", "svdquant-int4"]
    assert main([*words, "--json"]) == 0
    figures = answer(capsys)
    assert figures["rel_err"] == 0 and figures["unquantised"]["rel_err"] == pytest.approx(1 / 11)
    assert [model.quant for model, _ in pretended.asked] == ["svdquant-int4", "svdquant-int4", "none"]
    pretended = Pretended(one, one, one * 1.1)
    monkeypatch.setattr(verify, "own_sidecar", pretended.start)
    assert main(words) == 0
    assert "against the unquantised model: relative error 0.091" in capsys.readouterr().out
    assert main([*words, "--unquantised", "random:flux", "--json"]) == 1
    assert "is no model that random:wan was made of" in answer(capsys)["reason"]


def test_verify_refuses_a_plan_before_it_starts_anything(capsys, monkeypatch):
    monkeypatch.setattr(verify, "own_sidecar", None)
    assert main(["verify", "--model", "random:wan", "--devices", "cpu:2", "--ring", "3", "--json"]) == 1
    told = answer(capsys)
    assert math.prod(told["nearest"].values()) == 2 and told["nearest_devices"] == "cpu:2"
    assert "nearest plan that works" in told["reason"]
    few = ["--devices", "cpu:4", "--ring", "4", "--width", "16", "--height", "32"]
    assert main(["verify", "--model", "random:wan", *few, "--json"]) == 1
    assert "4 ranks share the tokens, but this latent has 2" in answer(capsys)["reason"]


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_prompts_have_the_widths_and_lengths_that_the_family_reads(family):
    facts = inspect_model(f"random:{family}")
    positive, negative = drawn_conditioning(facts)
    lengths = (facts.spec.text_length,) * 2 if facts.spec.picture_tokens else (19, 12)
    assert (positive.embedding.shape[1], negative.embedding.shape[1]) == lengths
    assert positive.embedding.shape[2] == facts.config[facts.spec.text_width]
    assert (positive.pooled is None) is (not facts.spec.pooled_width)


# generate


def test_generate_draws_what_the_prompt_says_and_logs_no_prompt(capsys, caplog):
    caplog.set_level(logging.DEBUG)
    words = [
        "generate",
        "--model",
        "tiny-shapes",
        "--devices",
        "cpu:1",
        "--prompt",
        PROMPT,
        "--steps",
        "12",
        "--seed",
        "3",
    ]
    assert main([*words, "--out", "shape.png", "--json"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    with Image.open(said["path"]) as image:
        assert check.inspect(np.asarray(image, dtype=np.float32) / 255) == ("red", "circle", "white")
    assert said["seed"] == 3 and set(said["plan"].values()) == {1}
    assert set(said["seconds"]) == {"load", "encode", "sample", "decode", "write", "total"}
    (held,) = [model for rank in said["memory"] for model in rank["models"]]
    assert held["model"] == "tiny-shapes" and held["host_bytes"] > 20 << 20
    assert 0 < said["seconds"]["sample"] < said["seconds"]["total"] >= said["seconds"]["load"]
    assert "circle" not in printed.err + caplog.text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "a.gif"], "name a .png file for a picture or a .mp4 file for a video"),
        (["--out", "a.png", "--frames", "9"], "frames is 9: name a .mp4 file"),
        (["--out", "nowhere/a.png"], "there is no folder"),
        (["--out", "a.png", "--width", "100"], "width 100 is no multiple of 8"),
        (["--out", "a.png", "--width", "100000"], "width is 100000: set it to 16384 or less"),
        (["--out", "a.mp4", "--frames", "400001"], "frames is 400001: set it to 16384 or less"),
        (["--out", "folder.png"], "folder.png is a folder: name another file"),
        (["--out", "a.mp4", "--frames", "8"], "1 more than a multiple of 4"),
        (["--out", "a.png", "--steps", "0"], "steps is 0: set it to 1 or more"),
        (["--out", "a.png", "--vae", "none.safetensors"], "none.safetensors: no such file or folder"),
        (["--out", "a.png", "--devices", "cpu:3", "--ulysses", "2"], "nearest plan that works"),
        (["--out", "a.png", "--devices", "cpu:3", "--cfg-parallel", "3"], "guidance evaluates 2 here"),
        (["--out", "a.png", "--devices", "cpu:2", "--data", "2"], "this latent has 1"),
    ],
)
def test_generate_refuses_before_it_starts_anything(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.setattr(generate, "own_sidecar", None)
    (tmp_path / "folder.png").mkdir()
    assert main(["generate", "--model", "tiny-shapes", "--prompt", PROMPT, *words]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        (TRANSFORMER, [], "comes without a text encoder"),
        (TRANSFORMER, ["--text-encoder", str(TRANSFORMER.parent / "text_encoder")], r"comes without a VAE.*\(--vae\)"),
        ("tiny-shapes", ["--vae", str(WEIGHTS)], r"pytorch_model.safetensors is no Wan 2.1 VAE \(it lacks"),
        ("random:flux", [], "takes CLIP-L and T5: use a DualCLIPLoader"),
    ],
)
def test_generate_tells_of_a_missing_part_before_it_samples(capsys, monkeypatch, model, words, says):
    monkeypatch.setattr(generate, "own_sidecar", None)
    assert main(["generate", "--model", str(model), "--prompt", PROMPT, "--out", "a.png", *words]) == 1
    assert re.search(says, capsys.readouterr().err)


def test_a_latent_has_the_shape_that_a_picture_or_video_has():
    assert empty_latent(WAN.latent, width=128, height=64, frames=9, batch=2).shape == (2, 16, 3, 8, 16)
    assert empty_latent(FLUX.latent, width=128, height=64, frames=1).shape == (1, 16, 8, 16)
    with pytest.raises(Refused, match="this model makes pictures"):
        empty_latent(FLUX.latent, width=128, height=64, frames=5)


def test_a_picture_keeps_its_numbers_and_a_video_its_frames(tmp_path):
    av = pytest.importorskip("av")
    images = torch.zeros(5, 32, 48, 3)
    images[..., 0] = torch.linspace(0, 1, 5).view(5, 1, 1)
    pictures.write(images[2:], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (48, 32) and image.getpixel((0, 0)) == (128, 0, 0)
    pictures.write(images, tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(frames) == 5 and frames[0].shape == (32, 48, 3)
    assert [frame[..., 0].mean() for frame in frames] == pytest.approx([0, 64, 128, 191, 255], abs=8)


def test_without_pyav_a_video_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(Refused, match=r"pip install av"):
        pictures.check_path(tmp_path / "a.mp4", frames=9)
