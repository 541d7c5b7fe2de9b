"""An autoencoder over several ranks gives what it gives on one: pictures, videos, both ways."""

from __future__ import annotations

import copy
from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn

from runtime.encoders.rows import Rows, split_rows
from runtime.encoders.vae import Autoencoder
from runtime.encoders.vae_files import load_autoencoder
from runtime.errors import Cancelled, Refused
from runtime.families.flux import FLUX
from runtime.families.flux2 import FLUX2
from runtime.families.qwen import QWEN
from runtime.families.wan import WAN
from runtime.mesh import Mesh
from runtime.progress import ignore_progress
from runtime.settings import AXES
from tests.processes import run_as_processes
from tests.ranks import run_as_threads

LIMIT = 5e-6
"""Largest difference, where the values are around 1."""

PICTURE_VAE = {
    "block_out_channels": (8, 16, 16, 16), "down_block_types": ("DownEncoderBlock2D",) * 4, "layers_per_block": 1,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "latent_channels": 16, "norm_num_groups": 4, "use_quant_conv": False,
    "use_post_quant_conv": False,
}  # fmt: skip
FAMILIES = {
    "wan": (WAN, {"base_dim": 8, "z_dim": 16}),
    "qwen": (QWEN, {"base_dim": 8, "z_dim": 16}),
    "flux": (FLUX, PICTURE_VAE),
    "flux2": (FLUX2, {**PICTURE_VAE, "latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True}),
}
LATENTS = {
    "wan": [(1, 16, 1, 8, 6), (3, 16, 3, 5, 7), (1, 16, 2, 2, 4), (1, 16, 2, 1, 1)],
    "qwen": [(1, 16, 1, 5, 6)],
    "flux": [(1, 16, 8, 6), (3, 16, 5, 7), (1, 16, 2, 3)],
    "flux2": [(1, 128, 5, 3)],
}
"""Rows that are dealt evenly, unevenly, and fewer of them than ranks."""
PIXELS = {
    "wan": [(1, 64, 48, 3), (11, 45, 61, 3), (5, 16, 24, 3), (2, 8, 8, 3)],
    "qwen": [(1, 40, 48, 3)],
    "flux": [(1, 64, 48, 3), (3, 45, 61, 3), (1, 16, 24, 3)],
    "flux2": [(1, 80, 48, 3)],
}
"""The same, with sides and frames that do not come out even."""
CASES = [
    (family, way, number)
    for family in FAMILIES
    for way in ("decode", "encode")
    for number in range(len(LATENTS[family]))
]


def save_models(folder: Path) -> None:
    """One VAE of each class, with random weights that keep the values around 1."""
    for name, (family, config) in FAMILIES.items():
        torch.manual_seed(0)
        model = getattr(diffusers, family.vae_class)(**config)
        for weight in model.parameters():
            nn.init.normal_(
                weight, **({"std": weight[0].numel() ** -0.5} if weight.ndim > 1 else {"mean": 0.3, "std": 0.3})
            )
        if hasattr(model, "bn"):
            nn.init.normal_(model.bn.running_mean, std=0.3)
            nn.init.uniform_(model.bn.running_var, 0.5, 2.0)
        model.save_pretrained(folder / name)


def read(folder: Path, name: str) -> nn.Module:
    return load_autoencoder(folder / name, FAMILIES[name][0])


def spread(model: nn.Module, name: str, mesh: Mesh) -> Autoencoder:
    form = FAMILIES[name][0].latent
    return Autoencoder(copy.deepcopy(model), form=form, rows=Rows(mesh.group(*AXES)), device=mesh.device)


def given(name: str, way: str, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if way == "decode":
        return torch.randn(LATENTS[name][number], generator=generator)
    return torch.rand(PIXELS[name][number], generator=generator)


def work_through(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """Every case on this rank; those of which it holds no result are left out."""
    coders = {name: spread(read(folder, name), name, mesh) for name in FAMILIES}
    results = {
        f"{name} {way} {number}": getattr(coders[name], way)(given(name, way, number), progress=ignore_progress)
        for name, way, number in CASES
    }
    return {name: tensor for name, tensor in results.items() if tensor is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vae")
    save_models(path)
    return path


@pytest.fixture(scope="module")
def one_rank(folder) -> dict[str, torch.Tensor]:
    return work_through(Mesh.single(), folder)


@pytest.fixture(scope="module")
def wan(folder) -> nn.Module:
    return read(folder, "wan")


@pytest.fixture(scope="module", params=[2, 3])
def many_ranks(request, folder) -> list[dict[str, torch.Tensor]]:
    (folder / "store").unlink(missing_ok=True)
    return run_as_processes("tests.test_vae_ranks:work_through", {"ulysses": request.param}, folder)


@pytest.mark.parametrize(("name", "way", "number"), CASES)
def test_ranks_give_what_one_gives(one_rank, many_ranks, name, way, number):
    key = f"{name} {way} {number}"
    expected, result = one_rank[key], many_ranks[0][key]
    error = float((result - expected).abs().max())
    print(f"largest difference {error:.1e}, where the deviation is {float(expected.std()):.2f}")
    assert result.shape == expected.shape and expected.std() > 0.02
    assert error < LIMIT
    assert not any(many_ranks[1:]), "a rank but the first holds results"


@pytest.mark.parametrize("degrees", [{"cfg": 2, "tensor": 2}, {"data": 2, "ring": 2, "ulysses": 2}], ids=str)
def test_all_ranks_of_any_mesh_share_the_rows(wan, one_rank, degrees):
    def work(mesh: Mesh) -> torch.Tensor | None:
        return spread(wan, "wan", mesh).decode(given("wan", "decode", 1), progress=ignore_progress)

    first, *others = run_as_threads(degrees, work)
    assert float((first - one_rank["wan decode 1"]).abs().max()) < LIMIT
    assert others == [None] * len(others)


@torch.inference_mode()
def test_one_rank_encodes_as_diffusers_does_and_leaves_out_what_does_not_fit(wan, one_rank):
    pixels = given("wan", "encode", 1)[:9, 2:42, 2:58]  # 45 x 61 cut to 40 x 56 in the middle, 11 frames to 9
    expected = wan.encode((pixels * 2 - 1).permute(3, 0, 1, 2).unsqueeze(0)).latent_dist.mean
    assert expected.shape == (1, 16, 3, 5, 7)
    assert torch.allclose(one_rank["wan encode 1"], expected, atol=1e-5)


class Stopper:
    """A progress that cancels at one of its calls, on every rank."""

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at

    def __call__(self, stage, step, total, *, preview=None) -> None:
        self.calls += 1
        if self.calls == self._at:
            raise Cancelled


@pytest.mark.parametrize("way", ["decode", "encode"])
def test_cancel_stops_all_ranks_at_one_point_and_the_next_run_is_right(wan, one_rank, way):
    def work(mesh: Mesh) -> tuple[int, torch.Tensor | None]:
        coder, stopper = spread(wan, "wan", mesh), Stopper(at=6)
        with pytest.raises(Cancelled):
            getattr(coder, way)(given("wan", way, 1), progress=stopper)
        return stopper.calls, getattr(coder, way)(given("wan", way, 1), progress=ignore_progress)

    (calls, result), (other_calls, _) = run_as_threads({"ulysses": 2}, work)
    assert calls == other_calls == 6
    assert float((result - one_rank[f"wan {way} 1"]).abs().max()) < LIMIT


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 7, 9, 3), "9 x 7 are too small .* 8 x 8"),
        ((1, 16, 16, 1), r"\(1, 16, 16, 1\)"),
        ((16, 16, 3), "height, width"),
    ],
)
def test_what_is_no_picture_is_refused(wan, shape, words):
    with pytest.raises(Refused, match=words):
        spread(wan, "wan", Mesh.single()).encode(torch.rand(shape), progress=ignore_progress)


@pytest.mark.parametrize(
    ("convolution", "says"),
    [
        (nn.Conv2d(1, 1, 5, padding=2), "0 cannot be split: rows 5 high in steps of 1"),
        (nn.Conv2d(1, 1, 3, stride=2, padding=1), "0 cannot be split: rows 3 high in steps of 2"),
    ],
)
def test_a_convolution_of_another_shape_is_not_split_in_silence(convolution, says):
    with pytest.raises(RuntimeError, match=says):
        split_rows(nn.Sequential(convolution), Rows(None))


def test_every_rank_refuses_a_latent_of_another_model_alike(wan):
    def work(mesh: Mesh) -> str:
        with pytest.raises(Refused, match="decodes 16 channels") as refusal:
            spread(wan, "wan", mesh).decode(torch.zeros(1, 4, 2, 2), progress=ignore_progress)
        return str(refusal.value)

    first, second = run_as_threads({"ulysses": 2}, work)
    assert first == second


def test_an_empty_latent_is_refused(wan):
    with pytest.raises(Refused, match=r"\(1, 16, 0, 4, 4\): there is nothing in it"):
        spread(wan, "wan", Mesh.single()).decode(torch.zeros(1, 16, 0, 4, 4), progress=ignore_progress)
