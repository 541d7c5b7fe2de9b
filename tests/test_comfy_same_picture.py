"""In one graph: stock UNETLoader and KSampler, and ours on two ranks, on the same checkpoint and CONDITIONING."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.tiny_shapes import MODEL_FOLDER
from runtime.tiny_shapes.export import export_comfy_transformer, export_comfy_vae
from tests.comfyui import ComfyUI, Run
from tests.graphs import MODEL, SAMPLER, SAVE, Prompt, picture

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.skipif(not (MODEL_FOLDER / "model_index.json").is_file(), reason="needs the trained tiny-shapes model"),
]

NAME = "tiny_as_comfyui_stores_it.safetensors"
STOCK_MODEL, STOCK_SAMPLER, STOCK_SAVE, SINGLE_FILE = "20", "21", "22", "23"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def single_file(comfyui: ComfyUI) -> dict[str, torch.Tensor]:
    """The transformer of tiny-shapes as a ComfyUI file, in the model folder."""
    folder = comfyui.base / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    export_comfy_transformer(folder / NAME)
    return load_file(folder / NAME)


def both(**inputs: dict) -> Prompt:
    """Our sampler on the single file, KSampler beside it with the same widgets; both latents are saved."""
    prompt = picture(**inputs)
    single = {**prompt[MODEL], "inputs": {**prompt[MODEL]["inputs"], "model": NAME, "dtype": "fp32"}}
    widgets = {**prompt[SAMPLER]["inputs"], "model": [STOCK_MODEL, 0]}
    prompt[SAMPLER]["inputs"]["model"] = [SINGLE_FILE, 0]
    return {
        **{node: prompt[node] for node in ("1", MODEL, "3", "4", "5", SAMPLER)},
        SINGLE_FILE: single,
        STOCK_MODEL: {"class_type": "UNETLoader", "inputs": {"unet_name": NAME, "weight_dtype": "default"}},
        STOCK_SAMPLER: {"class_type": "KSampler", "inputs": widgets},
        SAVE: {"class_type": "SaveLatent", "inputs": {"samples": [SAMPLER, 0], "filename_prefix": "ours"}},
        STOCK_SAVE: {"class_type": "SaveLatent", "inputs": {"samples": [STOCK_SAMPLER, 0], "filename_prefix": "stock"}},
    }


def latents(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and the stock one."""
    assert run.end.kind == "execution_success", run.end.data.get("exception_message")
    files: dict[str, list[Path]] = run.files("latents")
    return tuple(load_file(files[node][0])["latent_tensor"] for node in (SAVE, STOCK_SAVE))


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"SAMPLER": {"sampler_name": "euler_ancestral", "scheduler": "beta"}},
        {"SAMPLER": {"sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform", "denoise": 0.7}},
        {"SAMPLER": {"sampler_name": "uni_pc", "cfg": 1.0}, "SIZE": {"length": 9, "batch_size": 3}},
        {"PLAN": {"devices": "cpu:2", "ulysses": 1, "cfg": 2}},
    ],
    ids=[
        "euler",
        "euler_ancestral",
        "dpmpp_2m with denoise",
        "uni_pc without guidance, a batch of videos",
        "cfg parallel",
    ],
)
def test_the_graph_gives_ksamplers_latent(comfyui: ComfyUI, single_file, inputs: dict):
    ours, stock = latents(comfyui.run(both(**inputs)))
    error = float((ours - stock).abs().max() / stock.abs().max())
    print(f"largest difference {error:.1e} of the largest value")
    assert ours.shape == stock.shape
    assert error < TOLERANCE


STOCK_VAE = "30"


def decoded_and_encoded(decode: str, encode: str, vae: dict, place: int) -> Prompt:
    """A video of nine frames from the sampler, and seven of them at 125 x 131 back to a latent."""
    pictures, fewer, cut, latent = (str(place + number) for number in range(4))
    size = {"width": 125, "height": 131, "upscale_method": "bilinear", "crop": "disabled"}
    return {
        pictures: {"class_type": decode, "inputs": {**vae, "samples": [SAMPLER, 0]}},
        fewer: {"class_type": "ImageFromBatch", "inputs": {"image": [pictures, 0], "batch_index": 0, "length": 7}},
        cut: {"class_type": "ImageScale", "inputs": {"image": [fewer, 0], **size}},
        latent: {"class_type": encode, "inputs": {**vae, "pixels": [cut, 0]}},
    }


def test_decode_and_encode_give_what_the_stock_nodes_give(comfyui: ComfyUI):
    folder = comfyui.base / "models" / "vae"
    folder.mkdir(parents=True, exist_ok=True)
    export_comfy_vae(folder / NAME)
    prompt = picture(SIZE={"length": 9}, SAMPLER={"seed": 8})
    run = comfyui.run(
        {
            **{node: prompt[node] for node in ("1", MODEL, "3", "4", "5", SAMPLER)},
            STOCK_VAE: {"class_type": "VAELoader", "inputs": {"vae_name": NAME}},
            **decoded_and_encoded("OutriggerDecode", "OutriggerEncode", {"model": [MODEL, 0]}, 40),
            **decoded_and_encoded("VAEDecode", "VAEEncode", {"vae": [STOCK_VAE, 0]}, 50),
            SAVE: {"class_type": "SaveLatent", "inputs": {"samples": ["43", 0], "filename_prefix": "ours"}},
            STOCK_SAVE: {"class_type": "SaveLatent", "inputs": {"samples": ["53", 0], "filename_prefix": "stock"}},
        }
    )
    ours, stock = latents(run)
    error = float((ours - stock).abs().max() / stock.abs().max())
    print(f"largest difference {error:.1e} of the largest value")
    assert ours.shape == stock.shape == (1, 16, 2, 16, 15)
    assert error < TOLERANCE


@pytest.mark.parametrize("name", ["blocks.0.ffn.0.weight", "head.head.bias"])
def test_a_checkpoint_that_lacks_a_tensor_is_an_error_that_names_it(comfyui: ComfyUI, single_file, name: str):
    folder = comfyui.base / "models" / "diffusion_models"
    save_file({key: tensor for key, tensor in single_file.items() if key != name}, folder / "lacks_one.safetensors")
    run = comfyui.run(picture(MODEL={"model": "lacks_one.safetensors"}, SAMPLER={"seed": 81}))
    print(run.error["exception_message"])
    assert run.error["exception_type"] == "ValueError"
    assert "lacks_one.safetensors" in run.error["exception_message"]
    assert comfyui.run(picture(SAMPLER={"seed": 82})).end.kind == "execution_success"
