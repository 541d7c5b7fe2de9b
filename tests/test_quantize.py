"""Quantising does less harm than rounding to the nearest, goes on where it ended, and writes what Load Model reads."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime.__main__ import main
from runtime.bench.quant import bytes_ratio, draw, quantize_settings, rounded_to_nearest
from runtime.checkpoint import random_tensors
from runtime.commands import COMMANDS
from runtime.errors import Refused
from runtime.families.zimage import ZIMAGE
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.quant.svdquant.formats import INT4, NVFP4, UNSIGNED_INT4
from runtime.quantize import job
from runtime.quantize.inputs import input_file, read_inputs
from runtime.quantize.job import QuantizeSettings, quantize
from runtime.quantize.layer import fit_linear, nearest_error
from runtime.safetensors_header import read_header, read_metadata
from runtime.settings import TINY_SHAPES, ModelSettings
from runtime.tiny_shapes.evaluate import judge
from runtime.tiny_shapes.scenes import HELD_OUT
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_on_one
from tests.test_experts import write_expert
from tests.test_svdquant_ranks import FLIP_LIMIT

ROOT = Path(__file__).parents[1]
SMALL = {"prompts": ("a", "b"), "steps": 2, "tokens": 256}
RANK = 16


def drawn_layer(outliers: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with a decaying spectrum `(256, 256)` and inputs `(768, 256)`, of which some features are 30 times as large."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sizes = torch.exp(-torch.arange(256) / 40)
    weight = torch.linalg.qr(normal(256, 256)).Q * sizes @ torch.linalg.qr(normal(256, 256)).Q
    x = normal(768, 256)
    x[:, torch.randperm(256, generator=generator)[:outliers]] *= 30
    return weight, x


@pytest.mark.parametrize("form", [INT4, UNSIGNED_INT4, NVFP4], ids=lambda form: f"{form.name} {form.unsigned}")
def test_a_fit_to_inputs_with_outliers_beats_the_nearest(form):
    weight, x = drawn_layer(outliers=6)
    x = torch.nn.functional.gelu(x) if form.unsigned else x
    fitted = fit_linear(weight, x[256:], form=form, rank=32)
    ratio = fitted.error_on(x[:256], weight, form=form) / nearest_error(
        weight, x[:256], form=INT4 if form.unsigned else form
    )
    print(f"error {ratio:.2f} of rounding to the nearest")
    assert ratio < 0.3


def test_inputs_do_not_grow_with_the_runs(tmp_path):
    kept = torch.arange(3000.0).view(1000, 3)
    kept.numpy().tofile(input_file(tmp_path, "x"))
    read = read_inputs(tmp_path, "x", 3, most=10)
    assert read.shape == (10, 3) and torch.equal(read[[0, -1]], kept[[0, -1]])
    assert torch.equal(read_inputs(tmp_path, "x", 3, most=2000), kept)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """tiny-shapes in 4 bits, as the command makes it, and its report."""
    path = tmp_path_factory.mktemp("made") / "tiny-shapes.safetensors"
    return path, quantize(quantize_settings(), path, progress=ignore_progress)


def test_every_linear_of_tiny_shapes_is_better_off_than_rounded_to_the_nearest(made):
    ratios = torch.tensor([report.error / report.error_nearest for report in made[1]])
    print(f"median {ratios.median():.2f}, worst {ratios.max():.2f}")
    assert len(ratios) == 40
    assert ratios.median() < 0.5 and ratios.max() < 1


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.full)])
def test_pictures_in_4_bits_are_the_pictures(made, count):
    plain, four_bit = (
        Pipeline.load(ModelSettings(model=model), mesh=Mesh.single(), progress=ignore_progress)
        for model in (TINY_SHAPES, str(made[0]))
    )
    reference, pictures, nearest = (draw(plain, each, count) for each in (plain, four_bit, rounded_to_nearest()))
    decibels = [(-10 * (each - reference).square().flatten(1).mean(1).log10()).median() for each in (pictures, nearest)]
    right = sum(judge(prompt, frame[None].numpy()).right for prompt, frame in zip(HELD_OUT, pictures, strict=False))
    print(f"{decibels[0]:.1f} dB, rounded to the nearest {decibels[1]:.1f} dB, {right} of {count} right")
    assert decibels[0] > 28 and decibels[0] > decibels[1] + 2
    assert right >= 0.85 * count


def test_the_file_says_what_it_is(made):
    facts = inspect_model(str(made[0]))
    assert facts.config["num_layers"] == 4 and facts.family == "wan"
    assert facts.stored["blocks.0.ffn.net.2"].kind == "svdquant-int4-unsigned"
    assert {stored.kind for stored in facts.stored.values()} == {"svdquant-int4", "svdquant-int4-unsigned"}
    with safe_open(made[0], framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["quantization_config"])["weight"] == {
        "dtype": "int4",
        "scale_dtype": None,
        "group_size": 64,
    }
    assert 0.28 < bytes_ratio() < 0.29
    assert not list(made[0].parent.glob("*.parts*"))


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"cfg": 2, "ulysses": 2}, {"ring": 2, "tensor": 2}], ids=str)
def test_the_file_over_ranks_is_the_file_on_one(made, degrees):
    case = Case(model=str(made[0]), steps=2, degrees=degrees)
    [reference] = run_on_one([case])
    for result in run_as_threads(degrees, lambda mesh: run_case(case, mesh, {})):
        print(f"{relative_error(result, reference):.1e}")
        assert relative_error(result, reference) < FLIP_LIMIT  # at best the 2e-6 that the plain model has, at cfg 5


def test_a_model_is_quantised_once_and_not_onto_itself(made, tmp_path):
    expert = write_expert(tmp_path / "expert", seed=1)
    itself = expert / "diffusion_pytorch_model.safetensors"
    for model, out, says in (
        (made[0], tmp_path / "x", "is quantised already"),
        (expert, itself, "is the model itself"),
    ):
        with pytest.raises(Refused, match=says):
            quantize(quantize_settings(model=str(model)), out, progress=ignore_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["expert"]


@pytest.mark.full
def test_a_model_that_is_replaced_while_it_is_quantised_is_told_of(tmp_path):
    expert, out = write_expert(tmp_path / "expert", seed=1), tmp_path / "out.safetensors"
    path = expert / "diffusion_pytorch_model.safetensors"
    left = [path.with_name("new")]

    def replace(stage, step, total, **others):
        if stage == "quantizing" and left:
            left[0].write_bytes(path.read_bytes())
            left.pop().replace(path)

    with pytest.raises(Refused, match="has been replaced by another file, while it was quantised"):
        quantize(quantize_settings(model=str(expert)), out, progress=replace)
    assert not left and not out.exists()


def test_a_job_that_was_killed_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    flags = ["--model", "random:wan", "--steps", "1", "--tokens", "64", "--rank", "16", "--size", "64", "--json"]
    flags += ["--prompts", str(tmp_path / "prompts.txt")]
    killed, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    parts = tmp_path / "killed.safetensors.parts"

    process = subprocess.Popen(
        [sys.executable, "-m", "runtime", "quantize", "--out", str(killed), *flags], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while len(list(parts.glob("*.report"))) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not killed.exists()
    done = {path: path.stat().st_mtime_ns for path in (*parts.glob("*.report"), parts / "calibrated")}
    with pytest.raises(Refused, match=r"has parts of another job"):
        quantize(quantize_settings(model="random:wan"), killed, progress=ignore_progress)

    settings = QuantizeSettings(**{**json.loads((parts / "job.json").read_text())})
    settings = replace(settings, prompts=tuple(settings.prompts), latent=tuple(settings.latent))

    def full(path, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with (
        monkeypatch.context() as patched,
        pytest.raises(Refused, match=r"No space left on device\. What is done is kept"),
    ):
        patched.setattr(job, "write_whole", full)
        quantize(settings, killed, progress=ignore_progress)
    seen, again = [], []

    def watch(stage, step, total, **_):
        seen.append(stage)
        again.extend(path for path, time in done.items() if path.stat().st_mtime_ns != time)

    quantize(settings, killed, progress=watch)
    assert set(seen) == {"quantizing"} and not again  # what was done was left as it was
    assert main(["quantize", "--out", str(whole), *flags]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert len(layers) == 20 and {"error", "error_nearest", "bytes", "bytes_plain"} < set(layers[0])
    assert killed.read_bytes() == whole.read_bytes()


RECORDED = Path(__file__).with_name("nunchaku_files.json")
"""Of the first blocks and what is around them: number format and shape of every tensor that Nunchaku's own classes (commit
3a3cc3d) take from a file of the tiny model, and no other; of Flux by the names of its first loader, from which the second
one makes its own.
"""


def stored_in(path: Path) -> dict[str, list]:
    """Number format and shape of each tensor of a file."""
    return {name: [entry.dtype, *entry.shape] for name, entry in read_header(path).items()}


def first_blocks(tensors: dict[str, list]) -> dict[str, list]:
    """Without the further blocks, and without what Nunchaku takes out of the tensors beforehand."""
    later = re.compile(r"(layers|(single_)?transformer_blocks)\.1\..*|.*\.wtscale")
    return {name: each for name, each in tensors.items() if not later.fullmatch(name)}


def wide_zimage(folder: Path) -> Path:
    """A Z-Image whose widths are whole tiles, as those of the real one."""
    config = {**ZIMAGE.tiny, "dim": 384, "n_heads": 3, "n_kv_heads": 3, "axes_dims": (32, 48, 48)}
    with torch.device("meta"):
        model = diffusers.ZImageTransformer2DModel(**config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    save_file(dict(random_tensors(shapes)), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": ZIMAGE.transformer_class, **config}))
    return folder


@pytest.mark.full
def test_a_file_of_zimage_is_what_nunchaku_takes(tmp_path):
    model, path = wide_zimage(tmp_path), tmp_path / "out.safetensors"
    settings = quantize_settings(model=str(model), latent=(1, 16, 8, 8), rank=RANK, **SMALL)
    quantize(settings, path, progress=ignore_progress)
    assert first_blocks(stored_in(path)) == json.loads(RECORDED.read_text())["zimage"]
    case = {"family": "zimage", "latent": (1, 16, 8, 8), "steps": 2}
    [plain], [reference] = (run_on_one([Case(model=str(each), **case)]) for each in (model, path))
    assert 1e-3 < relative_error(reference, plain) < 1
    packed = Case(model=str(path), **case)
    for result in run_as_threads({"tensor": 3}, lambda mesh: run_case(packed, mesh, {})):
        assert relative_error(result, reference) < FLIP_LIMIT


@pytest.mark.parametrize(("family", "kind"), [("flux", "svdquant-int4"), ("qwen", "svdquant-nvfp4")])
def test_a_file_is_what_nunchaku_takes_and_is_read_by_its_parts(family, kind, tmp_path):
    """Fused and split, with modulation in 4 bits; read as the Linears of the class, whole and over ranks."""
    path = tmp_path / f"{family}.safetensors"
    latent = {"flux": (1, 16, 8, 8), "qwen": (1, 16, 1, 8, 8)}[family]
    settings = quantize_settings(model=f"random:{family}", kind=kind, latent=latent, rank=RANK, **SMALL)
    quantize(settings, path, progress=ignore_progress)
    assert first_blocks(stored_in(path)) == json.loads(RECORDED.read_text())[family]
    facts = inspect_model(str(path))
    linears = [name for name in facts.stored if name.endswith(("to_q", "to_k", "to_v"))]
    assert "awq-int4" in {stored.kind for stored in facts.stored.values()}
    assert read_metadata(path)["model_class"].startswith("Nunchaku")
    assert {facts.stored[name].rows for name in linears} == {(0, 128), (128, 256), (256, 384)}
    case = Case(model=str(path), family=family, latent=latent, steps=2)
    [plain] = run_on_one([Case(model=f"random:{family}", latent=latent, steps=2)])
    [reference] = run_on_one([case])
    assert 1e-3 < relative_error(reference, plain) < 1
    for result in run_as_threads({"tensor": 2}, lambda mesh: run_case(case, mesh, {})):
        assert relative_error(result, reference) < 0.1


def test_the_command_refuses_what_cannot_be_made(tmp_path):
    from runtime.commands.parser import parser_of

    parser, folder = parser_of(COMMANDS), tmp_path / "folder.safetensors"
    folder.mkdir()
    for words, says in (
        (["--rank", "20"], "rank 20 is not a multiple of 16"),
        (["--out", "x.bin"], "has to end with .safetensors"),
        (["--rank", "100000000"], "rank 100000000 is not a multiple of 16 up to 512"),
        (["--out", str(tmp_path)], "has to end with .safetensors"),
        (["--out", str(tmp_path / "none" / "x.safetensors")], "there is no folder"),
        (["--out", str(folder)], "is a folder: name another file"),
        (["--prompts", str(tmp_path)], "cannot be read: Is a directory$"),
        (["--steps", "0"], "steps 0 does not lie between 1 and"),
        (["--steps", "10001"], "steps 10001 does not"),
        (["--tokens", "0"], "tokens 0 does not"),
        (["--size", "-5"], "size -5 does not"),
        (["--size", "10000000"], "size 10000000 does not lie between 8 and 16384"),
    ):
        chosen = parser.parse_args(
            ["quantize", "--model", "random:wan", "--out", str(tmp_path / "x.safetensors"), *words]
        )
        with pytest.raises(Refused, match=says):
            chosen.run(chosen)
    assert list(tmp_path.iterdir()) == [folder]
