"""The truce over memory on a real ComfyUI: Unload Models (which is `/free`) and running out of memory free the ranks too."""

from __future__ import annotations

import ast
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.comfyui import ROOT, ComfyUI, gone
from tests.graphs import DECODE, NEGATIVE, POSITIVE, SAMPLER, SAVE, picture

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def comfyui(comfyui_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """One of its own: the other tests count on what theirs has loaded."""
    base = tmp_path_factory.mktemp("memory")
    shutil.copytree(Path(__file__).with_name("tiny_clip"), base / "custom_nodes" / "tiny_clip")
    with ComfyUI(comfyui_tree, base) as running:
        yield running


def loads(run) -> list[str]:
    """The lines that a node shows while a model is loaded."""
    return [text for text in run.texts() if text.startswith(("starting", "loading"))]


def sampled(comfyui: ComfyUI, seed: int) -> list[psutil.Process]:
    """The ranks after a prompt."""
    run = comfyui.run(picture(SAMPLER={"seed": seed, "steps": 1}))
    assert run.end.kind == "execution_success", run.end.data
    return comfyui.ranks()


def freed(comfyui: ComfyUI, body: dict, ranks: list[psutil.Process]) -> bool:
    """Whether `/free` ends the ranks. ComfyUI may miss the mark until it wakes up next, so it is asked again."""
    for _ in range(20):
        comfyui.post("/free", body)
        if gone(ranks, 1.0) == []:
            return True
    return False


@pytest.mark.parametrize("body", [{"unload_models": True}, {"free_memory": True}])
def test_free_lets_go_of_the_sidecars_models_and_the_next_prompt_works(comfyui: ComfyUI, body: dict):
    ranks = sampled(comfyui, 901)
    held = sum(rank.memory_info().rss for rank in ranks)
    asked = time.monotonic()
    assert len(ranks) == 2 and freed(comfyui, body, ranks)
    print(f"{held >> 20} MiB of two ranks were given back in {time.monotonic() - asked:.2f} s")
    run = comfyui.run(picture(SAMPLER={"seed": 902, "steps": 1}))
    assert run.end.kind == "execution_success" and loads(run)


def test_a_free_that_asks_for_nothing_frees_nothing(comfyui: ComfyUI):
    ranks = sampled(comfyui, 903)
    comfyui.post("/free", {"unload_models": False})
    run = comfyui.run(picture(SAMPLER={"seed": 904, "steps": 1}))
    assert loads(run) == [] and comfyui.ranks() == ranks


def test_a_node_of_comfyui_that_runs_out_of_memory_has_ours_freed(comfyui: ComfyUI):
    ranks = sampled(comfyui, 905)
    prompt = picture(SAMPLER={"seed": 905, "steps": 1})
    prompt["20"] = {"class_type": "RunsOut", "inputs": {"latent": [SAMPLER, 0]}}
    run = comfyui.run(prompt)
    assert run.error["node_type"] == "RunsOut" and gone(ranks, 10.0) == []
    assert sampled(comfyui, 906)


def test_what_each_rank_has_loaded_is_in_the_text_of_each_node(comfyui: ComfyUI):
    run = comfyui.run(picture(SAMPLER={"seed": 907, "steps": 1}))
    for node in (POSITIVE, NEGATIVE, SAMPLER, DECODE):
        if run.texts(node):
            assert "each of 2 ranks: tiny-shapes" in run.texts(node)[-1], node
    assert run.texts(SAMPLER) and SAVE not in {event.data["node"] for event in run.of("text")}


def test_the_stand_in_has_everything_that_comfyui_asks_of_a_loaded_model(comfyui_tree: Path):
    tree = ast.parse((comfyui_tree / "comfy" / "model_management.py").read_text(encoding="utf-8"))
    wanted = ("LoadedModel", "free_memory", "load_models_gpu", "unload_model_and_clones", "cleanup_models_gc")
    definitions = [node for node in tree.body if getattr(node, "name", "") in wanted]
    asked = {
        node.attr
        for definition in definitions
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2] in ("model", "x", "m", "model_to_unload")
    }
    owned = ast.parse((ROOT / "nodes" / "truce.py").read_text(encoding="utf-8"))
    known = {node.name for node in ast.walk(owned) if isinstance(node, ast.FunctionDef)}
    known |= {node.attr for node in ast.walk(owned) if isinstance(node, ast.Attribute)} | {"parent"}
    entries = {"currently_used", "device", "model_finalizer", "real_model"}  # of ComfyUI's own LoadedModel
    entries |= {
        node.name for definition in definitions for node in ast.walk(definition) if isinstance(node, ast.FunctionDef)
    }
    dynamic = {"loaded_ram_size", "__class__"}  # the first only of a model that `is_dynamic`
    assert {"detach", "loaded_size", "is_clone"} <= asked
    assert asked - known - entries - dynamic == set()
