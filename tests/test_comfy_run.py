"""The workflow on a real ComfyUI: picture, progress, previews, Cancel, a rank that dies."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from runtime.tiny_shapes import MODEL_FOLDER, check
from runtime.tiny_shapes.export import export_comfy_transformer, export_comfy_vae
from tests.comfyui import ComfyUI, Run
from tests.graphs import DECODE, MODEL, NEGATIVE, POSITIVE, SAMPLER, SAVE, picture, slow, template
from tests.lora_files import Draw, kohya

pytestmark = pytest.mark.comfy

OPEN = {"devices": "auto", "ulysses": 0, "ring": 0, "tensor": 0, "cfg": 0, "data": 0}
VERIFY = "20"
WIDTH = 256
"""Of tiny-shapes."""
ONE_STEP_MORE = 0.5
"""Seconds beyond a step that Cancel may take."""


def loads(run: Run) -> list[str]:
    """The lines that a node shows while the model is loaded."""
    return [text for text in run.texts() if text.startswith(("starting", "loading"))]


def pixels(path: Path) -> np.ndarray:
    """`(H, W, 3)` from 0 to 1."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.float32) / 255


def step_seconds(run: Run) -> float:
    """How long a step takes: the longest of those seen."""
    marks = [event.at for event in run.of("progress", SAMPLER)]
    return max(after - before for before, after in itertools.pairwise(marks))


def test_workflow_gives_a_picture_with_a_progress_event_and_a_preview_for_each_step(comfyui: ComfyUI):
    run = comfyui.run(picture())
    assert run.end.kind == "execution_success", run.end.data
    (path,) = run.images()
    with Image.open(path) as image:
        assert image.size == (128, 128)
        assert max(high - low for low, high in image.convert("RGB").getextrema()) > 20
    assert [event.data["value"] for event in run.of("progress", SAMPLER)] == [1, 2, 3, 4]
    assert {event.data["max"] for event in run.of("progress", SAMPLER)} == {4}
    previews = run.of("preview")
    assert len(previews) == 4
    assert all(event.data["image"][:2] == b"\xff\xd8" for event in previews)  # JPEG


def test_prompt_may_ask_for_no_previews(comfyui: ComfyUI):
    version = comfyui.get("/system_stats")["system"]["comfyui_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 5):
        pytest.skip(f"ComfyUI {version} has one setting for all prompts")
    run = comfyui.run(picture(SAMPLER={"seed": 5}), preview_method="none")
    assert run.end.kind == "execution_success"
    assert run.of("preview") == []


def test_second_prompt_finds_the_model_loaded(comfyui: ComfyUI):
    comfyui.run(picture(SAMPLER={"seed": 11}))
    run = comfyui.run(picture(SAMPLER={"seed": 12}, POSITIVE={"text": "a green cross on a gray background"}))
    assert run.end.kind == "execution_success"
    assert loads(run) == []


def test_other_devices_or_degrees_make_a_new_plan_and_the_node_says_which_and_why(comfyui: ComfyUI):
    plans = (
        ({}, "No GPU: one process with all cores is as fast"),
        ({"devices": "cpu:2"}, "2 ranks on the CPU: cfg 2"),
        ({"devices": "cpu:2", "cfg": 1, "ulysses": 2}, "2 ranks on the CPU: ulysses 2 (2 heads)"),
    )
    for seed, (plan, says) in enumerate(plans, start=61):
        for repeat in range(2):
            run = comfyui.run(picture(PLAN=OPEN | plan, SAMPLER={"seed": 2 * seed + repeat, "steps": 1}))
            *why, took = run.texts(SAMPLER)[-1].splitlines()
            assert "took" in took and says in why[0]
        assert not plan or len(comfyui.ranks()) == 2  # one rank may be the first of two that are there


def test_verify_shows_that_the_plan_is_as_good_as_one_rank(comfyui: ComfyUI):
    prompt = picture(PLAN=OPEN | {"devices": "cpu:2", "ring": 2})
    inputs = {name: prompt[SAMPLER]["inputs"][name] for name in ("model", "positive", "latent_image")}
    run = comfyui.run({**prompt, VERIFY: {"class_type": "OutriggerVerify", "inputs": inputs}})
    (text,) = run.outputs()[VERIFY]["text"]
    assert text == run.texts(VERIFY)[-1]
    assert text.startswith("the same: relative error ") and "ring 2 (2 heads)" in text
    assert 0 < float(re.search("relative error ([^ ]+)", text)[1]) < 1e-5
    assert len(comfyui.ranks()) == 2


def test_short_prompt_with_nothing_but_what_is_required_is_enough(comfyui: ComfyUI):
    prompt = picture()
    prompt[MODEL]["inputs"] = {"model": "tiny-shapes"}
    prompt[SAMPLER]["inputs"] = {"model": [MODEL, 0], "positive": [POSITIVE, 0], "latent_image": ["5", 0], "steps": 2}
    del prompt[NEGATIVE], prompt["1"]
    assert comfyui.run(prompt).end.kind == "execution_success"


def test_template_draws_what_its_prompt_says(comfyui: ComfyUI):
    (path,) = comfyui.run(template("text_to_image")).images()
    assert check.inspect(pixels(path)) == ("yellow", "triangle", "black")


def test_video_template_writes_nine_frames_in_which_the_shape_moves(comfyui: ComfyUI):
    frames = [pixels(path) for path in comfyui.run(template("text_to_video")).images()]
    assert len(frames) == 9
    assert [check.inspect(frame)[0::2] for frame in (frames[0], frames[-1])] == [("red", "white")] * 2
    assert check.centre_of(frames[-1])[0] > check.centre_of(frames[0])[0] + 0.05


def test_stock_nodes_template_draws_what_it_is_told_with_files_of_a_small_model(comfyui: ComfyUI):
    prompt, models = template("stock_nodes"), comfyui.base / "models"
    nodes = {entry["class_type"]: entry for entry in prompt.values()}
    files = {
        models / "diffusion_models" / nodes["OutriggerLoadModel"]["inputs"]["model"]: export_comfy_transformer,
        models / "vae" / nodes["VAELoader"]["inputs"]["vae_name"]: export_comfy_vae,
    }
    for path, export in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        export(path)
    nodes["CLIPLoader"].update(class_type="TinyCLIPLoader", inputs={"folder": str(MODEL_FOLDER)})
    nodes["EmptyHunyuanLatentVideo"]["inputs"].update(width=128, height=128, length=1)
    positive, negative = (prompt[nodes["OutriggerSampler"]["inputs"][side][0]] for side in ("positive", "negative"))
    positive["inputs"]["text"], negative["inputs"]["text"] = "a yellow triangle on a black background", ""
    run = comfyui.run(prompt)
    for path in files:
        path.unlink()
    assert run.end.kind == "execution_success", run.end.data.get("exception_message")
    (path,) = run.images()
    assert check.inspect(pixels(path)) == ("yellow", "triangle", "black")


@pytest.mark.alone
def test_warm_prompt_adds_little_to_the_sampling_itself(comfyui: ComfyUI):
    comfyui.run(picture())
    added = []
    for seed in range(5):
        run = comfyui.run(picture(SAMPLER={"seed": 100 + seed}))
        (line,) = [text for text in run.texts(SAMPLER) if " took " in text]
        added.append(run.seconds()[SAMPLER] - float(line.split()[-2]))
    print(
        f"a warm prompt adds {1000 * min(added):.0f} ms to the sampling, {1000 * statistics.median(added):.0f} as a rule"
    )
    assert min(added) < 0.05  # what it takes when no other program is in the way


def with_lora(name: str, strength: float) -> dict:
    """The picture behind an Outrigger LoRA; only its latent is saved."""
    prompt = picture()
    del prompt[DECODE]
    prompt["20"] = {
        "class_type": "OutriggerLora",
        "inputs": {"model": [MODEL, 0], "lora_name": name, "strength_model": strength},
    }
    prompt[SAMPLER]["inputs"]["model"] = ["20", 0]
    prompt[SAVE] = {"class_type": "SaveLatent", "inputs": {"samples": [SAMPLER, 0], "filename_prefix": "lora"}}
    return prompt


def test_a_lora_changes_the_picture_without_a_load_and_says_what_it_did(comfyui: ComfyUI):
    folder = comfyui.base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    layers = {f"blocks.{block}.self_attn.q": (WIDTH, WIDTH) for block in range(2)}
    strange = {"diffusion_model.blocks.0.diff_m": torch.zeros(2)}
    save_file(kohya(layers, Draw(1)) | strange, folder / "style.safetensors")
    save_file(kohya({"double_blocks.0.img_attn.qkv": (8, 8)}, Draw(1)), folder / "flux.safetensors")
    comfyui.run(picture())
    latents = []
    for strength in (1.0, 0.0, -1.0, 1.0):
        run = comfyui.run(with_lora("style.safetensors", strength))
        assert run.end.kind == "execution_success" and loads(run) == []
        latents.append(load_file(run.files("latents")[SAVE][0])["latent_tensor"])
        shown = [text for text in run.texts(SAMPLER) if " took " in text][-1].splitlines()
        expected = "style.safetensors: 2 targets applied; not applied: diffusion_model.blocks.0.diff_m"
        assert [line for line in shown if "targets" in line] == ([expected] if strength else [])
    assert torch.equal(latents[0], latents[3])
    assert not any(torch.allclose(latents[0], other, atol=1e-2) for other in latents[1:3])
    said = comfyui.run(with_lora("flux.safetensors", 1.0)).error["exception_message"]
    assert "looks like a LoRA for HunyuanVideo 1.5, Flux.1 dev or Kontext" in said
    run = comfyui.run(picture(SAMPLER={"seed": 77}))
    assert run.end.kind == "execution_success" and loads(run) == []


@pytest.mark.alone
def test_cancel_ends_within_a_step_and_leaves_the_model_loaded(comfyui: ComfyUI):
    comfyui.run(picture())
    beyond_a_step = []
    for step in (1, 2, 3):
        run = comfyui.queue(slow(SAMPLER={"seed": step}))
        run.wait_for("progress", node=SAMPLER, count=step + 1)
        pressed = time.monotonic()
        comfyui.interrupt()
        run.wait(60)
        assert run.end.kind == "execution_interrupted"
        print(f"Cancel took {run.end.at - pressed:.2f} s, a step {step_seconds(run):.2f} s")
        beyond_a_step.append(run.end.at - pressed - step_seconds(run))
    assert min(beyond_a_step) < ONE_STEP_MORE
    after = comfyui.run(picture(SAMPLER={"seed": 21}))
    assert after.end.kind == "execution_success"
    assert loads(after) == []


def test_rank_killed_in_mid_step_is_an_error_on_the_sampler_and_the_next_prompt_works(comfyui: ComfyUI):
    comfyui.run(picture())
    run = comfyui.queue(slow(SAMPLER={"seed": 31}))
    run.wait_for("progress", node=SAMPLER, count=2)
    rank = comfyui.ranks()[1]
    killed = time.monotonic()
    rank.kill()
    run.wait(30)
    print(f"the error came after {run.end.at - killed:.2f} s: {run.error['exception_message'].splitlines()[0]}")
    assert run.end.at - killed < 5
    assert run.error["node_id"] == SAMPLER
    assert run.error["exception_type"] == "outrigger.SidecarFailure"
    assert "rank" in run.error["exception_message"]
    assert "sampling" in run.error["exception_message"]
    assert comfyui.run(picture(SAMPLER={"seed": 32})).end.kind == "execution_success"


def test_sidecar_killed_in_mid_step_is_an_error_and_the_next_prompt_works(comfyui: ComfyUI):
    comfyui.run(picture())
    run = comfyui.queue(slow(SAMPLER={"seed": 41}))
    run.wait_for("progress", node=SAMPLER, count=2)
    (server,) = psutil.Process(comfyui.process.pid).children()
    server.kill()
    run.wait(30)
    assert run.error["node_id"] == SAMPLER
    assert "next prompt starts a new one" in run.error["exception_message"]
    assert comfyui.run(picture(SAMPLER={"seed": 42})).end.kind == "execution_success"


def test_cancel_while_the_model_is_loaded_is_an_interrupt(comfyui: ComfyUI):
    run = comfyui.queue(picture(MODEL={"dtype": "bf16"}))
    run.wait_for("text")
    comfyui.interrupt()
    run.wait(30)
    assert run.end.kind == "execution_interrupted"
    assert comfyui.run(picture(SAMPLER={"seed": 51})).end.kind == "execution_success"


def test_cancel_while_a_video_is_decoded_is_an_interrupt(comfyui: ComfyUI):
    size = {"width": 256, "height": 256, "length": 33}
    run = comfyui.queue(picture(SIZE=size, SAMPLER={"steps": 1}))
    run.wait_for("progress", node=DECODE)
    pressed = time.monotonic()
    comfyui.interrupt()
    run.wait(60)
    assert run.end.kind == "execution_interrupted"
    print(f"Cancel of the decoding took {run.end.at - pressed:.2f} s")
