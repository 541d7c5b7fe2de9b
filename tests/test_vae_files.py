"""Single files of autoencoders, in the names that ComfyUI has for them."""

from __future__ import annotations

import re
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import build_transformer, random_tensors
from runtime.encoders.rows import Rows
from runtime.encoders.vae import Autoencoder
from runtime.encoders.vae_files import check_autoencoder, load_autoencoder
from runtime.encoders.vae_names import FLUX2_FILE, KL_FILE, WAN22_FILE, WAN_FILE, VaeFile
from runtime.errors import Refused
from runtime.families.flux import FLUX
from runtime.families.flux2 import FLUX2
from runtime.families.qwen import QWEN
from runtime.families.sd3 import SD3
from runtime.families.wan import WAN
from runtime.families.wan_image import WAN22_TI2V
from runtime.inspection import inspect_model
from runtime.progress import ignore_progress
from tests.published_keys import read_keys, write_file
from tests.stock import ask_comfyui, relative_error

FLUX_VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip


WAN22_VAE = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "in_channels": 12, "out_channels": 12, "is_residual": True,
    "patch_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "config"),
    [
        ("ae", KL_FILE, FLUX_VAE),
        ("wan_2.1_vae", WAN_FILE, {"base_dim": 96, "z_dim": 16}),
        ("wan2.2_vae", WAN22_FILE, WAN22_VAE),
        ("flux2-vae", FLUX2_FILE, {}),
    ],
)
def test_the_names_of_published_files_are_those_of_the_class(name, kind, config):
    keys = read_keys("vae")[name]
    found = {ours: keys[theirs] for ours, theirs in kind.renamed(keys).items()}
    with torch.device("meta"):
        model_class = getattr(diffusers, kind.model_class)
        published, ours = (model_class(**each).state_dict() for each in (config, kind.config_from(found)))
    assert {key: tuple(tensor.shape) for key, tensor in published.items()} == {
        key: shape[:2]
        if key.split(".")[-2] in ("to_q", "to_k", "to_v", "0") and "attentions" in key and len(shape) == 4
        else shape
        for key, shape in found.items()
    }
    assert {key: tensor.shape for key, tensor in ours.items()} == {
        key: tensor.shape for key, tensor in published.items()
    }


def original(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A diffusers AutoencoderKL under the original names, its attention as convolutions."""
    stages = 1 + max(int(found[1]) for name in tensors if (found := re.match(r"decoder\.up_blocks\.(\d+)", name)))
    renames = (
        (r"up_blocks\.(\d+)", lambda found: f"up.{stages - 1 - int(found[1])}"), (r"down_blocks\.", "down."),
        (r"\.mid_block\.resnets\.0", ".mid.block_1"), (r"\.mid_block\.resnets\.1", ".mid.block_2"),
        (r"resnets", "block"), (r"downsamplers\.0", "downsample"), (r"upsamplers\.0", "upsample"),
        (r"conv_shortcut", "nin_shortcut"), (r"mid_block\.attentions\.0", "mid.attn_1"), (r"group_norm", "norm"),
        (r"to_out\.0", "proj_out"), (r"to_([qkv])\.", r"\1."), (r"conv_norm_out", "norm_out"),
    )  # fmt: skip
    named = {}
    for name, tensor in tensors.items():
        is_matrix = "attentions" in name and tensor.ndim == 2
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        named[name] = (tensor[..., None, None] if is_matrix else tensor).contiguous()
    return named


@pytest.fixture(scope="module")
def model() -> diffusers.AutoencoderKL:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(**{**FLUX_VAE, "block_out_channels": (32, 32, 64, 64), "layers_per_block": 1}).eval()


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
def test_a_single_file_decodes_as_the_class_that_it_was_made_of(model, tmp_path, prefix):
    tensors = {f"{prefix}{name}": tensor for name, tensor in original(model.state_dict()).items()}
    others = {"model.diffusion_model.img_in.weight": torch.zeros(2)} if prefix else {}
    save_file({**tensors, **others}, tmp_path / "ae.safetensors")
    read = load_autoencoder(tmp_path / "ae.safetensors", FLUX)
    latent, pixels = torch.randn(1, 16, 4, 6), torch.randn(1, 3, 32, 48)
    assert torch.equal(read.decode(latent).sample, model.decode(latent).sample)
    assert torch.equal(read.encode(pixels).latent_dist.mean, model.encode(pixels).latent_dist.mean)


SMALL = {
    "double_z": True, "z_channels": 32, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 1, 2, 2],
    "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "batch_norm_latent": True,
}  # fmt: skip
STOCK = {
    "wan2.2-ti2v": (WAN22_TI2V, (1, 48, 2, 3, 2), (5, 48, 32, 3), {
        "module": "comfy.ldm.wan.vae2_2", "class": "WanVAE", "arguments": {
            "dim": 16, "dec_dim": 24, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
            "temperal_downsample": [False, True, True]}}),
    "flux2": (FLUX2, (1, 128, 3, 2), (1, 48, 32, 3), {
        "module": "comfy.ldm.models.autoencoder", "class": "AutoencoderKL", "arguments": {"embed_dim": 32, "ddconfig": SMALL}}),
}  # fmt: skip
"""Family, latent, pixels, and ComfyUI's class in a small size."""
AGAINST_COMFYUI = 1e-5


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, tuple]:
    """What ComfyUI's classes make of a latent and of pixels, and the file of their weights, by family."""
    folder, inputs, cases = tmp_path_factory.mktemp("stock"), {}, []
    for name, (_, latent, pixels, described) in STOCK.items():
        inputs |= {f"{name} latent": torch.randn(latent), f"{name} pixels": torch.rand(pixels)}
        turned = inputs[f"{name} pixels"].movedim(-1, 1) * 2 - 1
        inputs[f"{name} turned"] = (
            turned.transpose(0, 1)[None].contiguous() if len(latent) == 5 else turned.contiguous()
        )
        given = {"latent": f"{name} latent", "pixels": f"{name} turned", "file": str(folder / f"{name}.safetensors")}
        cases.append({**described, **given})
    results = ask_comfyui(folder, inputs=inputs, autoencoders=cases)
    made = [
        {key: results[f"autoencoders.{number}.{key}"] for key in ("decoded", "encoded")} for number in range(len(cases))
    ]
    return {
        name: (folder / f"{name}.safetensors", inputs[f"{name} latent"], inputs[f"{name} pixels"], each)
        for name, each in zip(STOCK, made, strict=True)
    }


@pytest.mark.parametrize("name", STOCK)
def test_a_file_of_comfyuis_class_decodes_and_encodes_as_that_class(stock, name):
    family, (path, latent, pixels, made) = STOCK[name][0], stock[name]
    coder = Autoencoder(load_autoencoder(path, family), form=family.latent, rows=Rows(None), device=torch.device("cpu"))
    pictures = ((made["decoded"] + 1) / 2).clamp(0, 1).movedim(1, -1).flatten(0, -4)
    assert pictures.std() > 0.02
    assert relative_error(coder.decode(latent, progress=ignore_progress), pictures) < AGAINST_COMFYUI
    assert relative_error(coder.encode(pixels, progress=ignore_progress), made["encoded"]) < AGAINST_COMFYUI


def test_the_vae_of_wan_2_1_is_not_that_of_2_2(stock):
    with pytest.raises(Refused, match=r"no Wan 2\.1 VAE"):
        load_autoencoder(stock["wan2.2-ti2v"][0], WAN)


@pytest.mark.parametrize(("family", "kind"), [(WAN, WAN_FILE), (FLUX, KL_FILE), (SD3, KL_FILE)])
def test_the_vae_of_another_family_is_refused_by_what_it_lacks(model, tmp_path, family, kind: VaeFile):
    tensors = original(model.state_dict()) if family is WAN else {"decoder.head.0.gamma": torch.ones(96, 1, 1, 1)}
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(Refused, match=rf"no {kind.title} \(it lacks .*use a VAE Loader"):
        load_autoencoder(tmp_path / "vae.safetensors", family)


@pytest.mark.parametrize("family", [FLUX, SD3])
def test_the_vae_of_stable_diffusion_1_is_refused_by_its_channels(tmp_path, family):
    sizes = {"latent_channels": 4, "block_out_channels": (32, 32, 64, 64), "layers_per_block": 1}
    small = diffusers.AutoencoderKL(**{**FLUX_VAE, **sizes})
    small.save_pretrained(tmp_path / "vae")
    save_file(original(small.state_dict()), tmp_path / "vae.safetensors")
    for path in (tmp_path / "vae", tmp_path / "vae.safetensors"):
        with pytest.raises(Refused, match=rf"is a VAE of 4 channels, but the latents of {family.title} have 16"):
            load_autoencoder(path, family)


@pytest.mark.parametrize(
    ("name", "family", "last", "colours"),
    [
        ("wan_2.1_vae", WAN, "decoder.head.2.weight", 12),
        ("wan_2.1_vae", QWEN, "decoder.head.2.weight", 4),
        ("wan2.2_vae", WAN22_TI2V, "decoder.head.2.weight", 16),
        ("ae", FLUX, "decoder.conv_out.weight", 4),
    ],
)
def test_a_vae_of_other_colours_is_refused_before_it_is_read(name, family, last, colours, tmp_path):
    """Such as Qwen-Image-Layered's, with transparency, and one of Wan that draws four pixels for each."""
    keys = read_keys("vae")[name]
    shapes = {**keys, last: (colours, *keys[last][1:])}
    check_autoencoder(Path(write_file(tmp_path / "own.safetensors", keys)), family)
    with pytest.raises(Refused, match=rf"draws {colours} numbers for a place.*: use a VAE Loader"):
        check_autoencoder(Path(write_file(tmp_path / "other.safetensors", shapes)), family)


def test_a_pickled_vae_is_not_opened(tmp_path):
    (tmp_path / "vae.pt").write_bytes(b"PK")
    with pytest.raises(Refused, match="is a pickle, which can run code"):
        load_autoencoder(tmp_path / "vae.pt", FLUX)


def test_a_checkpoint_with_a_vae_is_a_model_with_a_vae(model, tmp_path: Path):
    _, shapes = build_transformer(inspect_model("random:flux"))
    transformer = {f"model.diffusion_model.{name}": tensor.contiguous() for name, tensor in random_tensors(shapes)}
    path = tmp_path / "all.safetensors"
    save_file({**transformer, **{f"vae.{name}": each for name, each in original(model.state_dict()).items()}}, path)
    facts = inspect_model(str(path))
    assert facts.family == "flux" and facts.vae == path
    assert set(facts.sources[0].names) == set(shapes)
    save_file(transformer, path)
    assert inspect_model(str(path)).vae is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder.conv_in.weight": torch.int32}, r"decoder\.conv_in\.weight is I32\), and weights are read in"),
        ({"first_stage_model.decoder.conv_in.bias": None}, r"has vae\.decoder\.conv_in\.bias and first_stage_model"),
        ({"vae.decoder.conv_out.bias": torch.bool}, r"vae\.decoder\.conv_out\.bias is BOOL\)"),
        (
            {"vae.decoder.mid_block.resnets.0.norm1.bias": None},
            r"has vae\.decoder\.mid.*norm1\.bias and vae\.decoder\.mid",
        ),
    ],
)
def test_numbers_that_are_no_floats_and_tensors_under_two_names_are_refused(model, tmp_path, change, words):
    [(name, dtype)] = change.items()
    prefix = "vae." if name.startswith(("vae.", "first")) else ""
    tensors = {f"{prefix}{each}": tensor for each, tensor in original(model.state_dict()).items()}
    tensors[name] = torch.zeros(1) if dtype is None else tensors[name].to(dtype)
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(Refused, match=words):
        load_autoencoder(tmp_path / "vae.safetensors", FLUX)


def test_a_folder_of_a_variant_alone_is_read_and_one_of_other_numbers_refused(model, tmp_path):
    model.save_pretrained(tmp_path / "half", variant="fp16")
    loaded = load_autoencoder(tmp_path / "half", FLUX).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    whole = {name: tensor.to(torch.int64) for name, tensor in model.state_dict().items()}
    save_file(whole, tmp_path / "half" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(Refused, match=r"is I64\), and weights are read in"):
        load_autoencoder(tmp_path / "half", FLUX)
