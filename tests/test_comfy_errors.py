"""Bad input on a real ComfyUI: a clear error on the node, with ComfyUI and the next prompt alive."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.comfyui import ComfyUI, Refused
from tests.graphs import MODEL, PLAN, POSITIVE, SAMPLER, SIZE, picture

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module", autouse=True)
def bad_files(comfyui: ComfyUI) -> Path:
    """Files that are not what their names say."""
    folder = comfyui.base / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.safetensors").write_text("<html>not a model, but a page that was saved under its name</html>")
    (folder / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "cut.safetensors").write_bytes(struct.pack("<Q", 1000) + b'{"a":')
    save_file({"down_blocks.0.weight": torch.zeros(2, 2)}, folder / "other.safetensors")
    save_file({"patch_embedding.weight": torch.zeros(256, 16, 1, 2, 2)}, folder / "incomplete.safetensors")
    (comfyui.base / "models" / "diffusers" / "hollow").mkdir(parents=True, exist_ok=True)
    (comfyui.base / "models" / "diffusers" / "hollow" / "model_index.json").write_text(json.dumps({"_class_name": "X"}))
    return folder


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("text.safetensors", "text.safetensors"),
        ("pointer.safetensors", "pointer.safetensors"),
        ("empty.safetensors", "empty.safetensors"),
        ("cut.safetensors", "cut.safetensors"),
        ("other.safetensors", "other.safetensors"),
        ("incomplete.safetensors", "incomplete.safetensors"),
        ("hollow", "hollow"),
    ],
)
def test_a_file_that_is_no_model_is_an_error_that_names_it(comfyui: ComfyUI, model: str, says: str):
    run = comfyui.run(picture(MODEL={"model": model}))
    print(run.error["exception_message"])
    assert run.error["exception_type"] == "ValueError"
    assert says in run.error["exception_message"].splitlines()[0]
    assert "pydantic" not in run.error["exception_message"]


@pytest.mark.parametrize(
    ("inputs", "node", "says"),
    [
        ({"MODEL": {"model": "nowhere.safetensors"}}, MODEL, "is not in models/diffusion_models"),
        ({"MODEL": {"model": "model.ckpt"}}, MODEL, "convert it to .safetensors"),
        ({"PLAN": {"devices": "cpu:2", "ulysses": 4}}, PLAN, "cpu:2 is 2 devices, but"),
        ({"PLAN": {"devices": "gpu"}}, PLAN, "is not one of: auto, cpu:N"),
        ({"SAMPLER": {"sampler_name": "hun"}}, SAMPLER, "choose one of: euler"),
        ({"SAMPLER": {"scheduler": "karas"}}, SAMPLER, "choose one of: simple"),
        ({"SAMPLER": {"steps": 0}}, SAMPLER, "steps"),
        ({"SAMPLER": {"cfg": 101.0}}, SAMPLER, "cfg"),
    ],
)
def test_a_bad_value_is_refused_when_it_is_queued(comfyui: ComfyUI, inputs: dict, node: str, says: str):
    with pytest.raises(Refused) as refusal:
        comfyui.run(picture(**inputs))
    assert says in refusal.value.details(node)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"MODEL": {"dtype": "int3"}}, "choose one of"),
        ({"PLAN": {"devices": "cpu:3", "ulysses": 3}}, "heads"),
        ({"PLAN": {"devices": "cpu:3", "ulysses": 1, "tensor": 3}}, "heads"),
        ({"PLAN": {"devices": "cuda:0,1", "ulysses": 2}}, "cuda"),
        ({"MODEL": {"text_encoder": "none.safetensors"}}, "text_encoder 'none.safetensors' is not in"),
    ],
)
def test_a_value_that_only_the_model_can_judge_is_an_error_on_the_node(comfyui: ComfyUI, inputs: dict, says: str):
    try:
        run = comfyui.run(picture(**inputs))
    except Refused as refusal:  # ComfyUI since 0.8 checks combos itself
        assert "value_not_in_list" in str(refusal)
        return
    print(run.error["exception_message"])
    assert run.error["exception_type"] == "ValueError"
    assert says in run.error["exception_message"].splitlines()[0]


def test_conditioning_that_a_stock_node_changed_is_refused_by_name(comfyui: ComfyUI):
    prompt = picture(SAMPLER={"positive": ["20", 0]})
    prompt["20"] = {"class_type": "ReferenceLatent", "inputs": {"conditioning": [POSITIVE, 0], "latent": [SIZE, 0]}}
    run = comfyui.run(prompt)
    assert run.error["node_id"] == SAMPLER
    assert "remove Reference Latent" in run.error["exception_message"]


def test_conditioning_of_another_model_is_an_error_that_says_so(comfyui: ComfyUI):
    prompt = picture(SAMPLER={"latent_image": ["20", 0]})
    prompt["20"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 128, "height": 128, "batch_size": 1}}
    assert comfyui.run(prompt).end.kind == "execution_success"  # an empty latent of 4 channels becomes one of 16


def test_stock_nodes_that_change_nothing_are_accepted(comfyui: ComfyUI):
    prompt = picture(SAMPLER={"positive": ["20", 0], "negative": ["21", 0]})
    whole = {"conditioning": ["3", 0], "start": 0.0, "end": 1.0}
    prompt["20"] = {"class_type": "ConditioningSetTimestepRange", "inputs": whole}
    prompt["21"] = {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["3", 0]}}
    assert comfyui.run(prompt).end.kind == "execution_success"


def test_after_all_of_it_the_next_prompt_works(comfyui: ComfyUI):
    assert comfyui.run(picture(SAMPLER={"seed": 61})).end.kind == "execution_success"
