"""Previews: ComfyUI's own pictures of the same latent and file; what cannot be drawn so is said and drawn roughly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from runtime.encoders import tiny
from runtime.families import FAMILIES
from runtime.previews import previewer
from tests.stock import ask_comfyui

CPU = torch.device("cpu")
LATENTS = {
    "wan": torch.randn(2, 16, 3, 5, 7, generator=torch.Generator().manual_seed(1)),
    "flux": torch.randn(2, 16, 6, 4, generator=torch.Generator().manual_seed(2)),
    "flux2": torch.randn(1, 128, 3, 5, generator=torch.Generator().manual_seed(4)),
}
FORMATS = {"wan": "Wan21", "flux": "Flux", "flux2": "Flux2"}


def write_decoder(folder, family: str, name: str = "") -> str:
    """A small decoder of random weights, in the layout of the published files."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = tiny._picture_decoder(16) if family == "flux" else tiny._video_decoder(16, 3)
    prefix = "" if family == "flux" else "decoder."
    weights = {f"{prefix}{name}": 1.5 * tensor for name, tensor in model.state_dict().items()}
    path = folder / (name or f"{FAMILIES[family].latent.preview_decoder}.safetensors")
    save_file(weights, path)
    return str(path)


def draw(kind: str, family: str, decoders: list[str]) -> tuple[torch.Tensor, str]:
    picture, notice = previewer(kind, FAMILIES[family].latent, decoders=decoders, device=CPU)
    return picture(LATENTS[family]), notice


@pytest.mark.comfy
def test_pictures_are_comfyuis_within_rounding(tmp_path):
    files = {family: write_decoder(tmp_path, family) for family in ("wan", "flux")}
    cases = [
        {"folder": str(tmp_path), "method": method, "latent_format": FORMATS[family], "latent": family}
        for family in FORMATS
        for method in ("auto", "latent2rgb", *(["taesd"] if family in files else []))
    ]
    stock = ask_comfyui(tmp_path, inputs=LATENTS, previews=cases)
    for number, case in enumerate(cases):
        kind = "taesd" if case["method"] == "taesd" else "latent2rgb"
        ours, notice = draw(kind, case["latent"], list(files.values()))
        theirs = stock[f"previews.{number}"]
        assert not notice and ours.shape == theirs.shape
        size = 8 if kind == "taesd" else FAMILIES[case["latent"]].latent.shuffle
        assert tuple(ours.shape[:2]) == tuple(size * side for side in LATENTS[case["latent"]].shape[-2:])
        apart = (ours.int() - theirs.int()).abs()
        print(
            case["latent_format"], case["method"], f"apart {int(apart.max())}, spread {float(ours.float().std()):.0f}"
        )
        assert apart.max() <= 1 and ours.float().std() > 5


def test_no_previews_are_drawn_where_none_are_wanted():
    assert previewer("none", FAMILIES["wan"].latent, decoders=["lighttaew2_1.safetensors"], device=CPU) == (None, "")


def test_a_file_that_is_not_safetensors_is_never_opened(tmp_path):
    trap = tmp_path / "lighttaew2_1.pth"
    trap.write_bytes(b"\x80\x02cos\nsystem\n")
    picture, notice = draw("taesd", "wan", [str(trap)])
    assert "latent2rgb" in notice and "convert lighttaew2_1.pth to .safetensors" in notice
    assert torch.equal(picture, draw("latent2rgb", "wan", [])[0])
    readable = write_decoder(tmp_path, "wan")
    assert draw("taesd", "wan", [str(trap), readable])[1] == ""


def test_a_file_that_is_missing_or_of_another_model_is_named(tmp_path):
    assert "put taef1_decoder.safetensors into models/vae_approx" in draw("taesd", "flux", ["taesd_decoder.sft"])[1]
    other = write_decoder(tmp_path, "flux", "lighttaew2_1_of_flux.safetensors")
    picture, notice = draw("taesd", "wan", [other])
    assert notice == "" and picture.shape == (40, 56, 3)  # the layout says which kind it is, not the name
    four_channels = tmp_path / "taef1_decoder.safetensors"
    save_file({"1.weight": torch.zeros(64, 4, 3, 3)}, four_channels)
    assert "is no small decoder of latents with 16 channels" in draw("taesd", "flux", [str(four_channels)])[1]
    save_file({"1.weight": torch.zeros(64, 16, 3, 3)}, four_channels)
    assert "is no small decoder, or is damaged" in draw("taesd", "flux", [str(four_channels)])[1]
    save_file({"decoder.1.weight": torch.zeros(256, 16, 3, 3), "decoder.22.bias": torch.zeros(())}, four_channels)
    assert "is no small decoder of latents" in draw("taesd", "flux", [str(four_channels)])[1]
    overlapping = b'{"1.weight":{"dtype":"U8","shape":[1,16],"data_offsets":[0,16]},"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}'
    four_channels.write_bytes(len(overlapping).to_bytes(8, "little") + overlapping + bytes(16))
    assert "is damaged: its tensors 'a' and '1.weight' share bytes" in draw("taesd", "flux", [str(four_channels)])[1]
    four_channels.write_bytes(b"PK\x03\x04 not what the name says")
    assert "pickled PyTorch file" in draw("taesd", "flux", [str(four_channels)])[1]
