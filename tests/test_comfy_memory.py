"""The truce over memory on a real ComfyUI: Unload Models, `/free`, and running out of memory free the sidecar's ranks too."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.comfyui import ROOT, ComfyUI, gone
from tests.graphs import DECODE, NEGATIVE, POSITIVE, SAMPLER, SAVE, picture

pytestmark = pytest.mark.comfy

OUT_OF_MEMORY = '''
"""A node that runs out of memory, as a model of ComfyUI's own would."""
import torch

class RunsOut:
    CATEGORY, FUNCTION, OUTPUT_NODE, RETURN_TYPES = "tests", "run", True, ()

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    def run(self, latent):
        raise torch.OutOfMemoryError("no memory left")

NODE_CLASS_MAPPINGS = {"RunsOut": RunsOut}
'''


@pytest.fixture(scope="module")
def server(comfyui_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """A ComfyUI of its own, for what is freed."""
    base = tmp_path_factory.mktemp("memory")
    (base / "custom_nodes" / "runs_out").mkdir(parents=True)
    (base / "custom_nodes" / "runs_out" / "__init__.py").write_text(OUT_OF_MEMORY)
    with ComfyUI(comfyui_tree, base) as running:
        yield running


def loads(run) -> list[str]:
    """The lines that a node shows while a model is loaded."""
    return [text for text in run.texts() if text.startswith(("starting", "loading"))]


def sampled(server: ComfyUI, seed: int) -> list[psutil.Process]:
    """The ranks after a prompt."""
    run = server.run(picture(SAMPLER={"seed": seed, "steps": 1}))
    assert run.end.kind == "execution_success", run.end.data
    return server.ranks()


@pytest.mark.parametrize(
    "body", [{"unload_models": True}, {"free_memory": True}, {"unload_models": True, "free_memory": True}]
)
def test_free_lets_go_of_the_sidecars_models_and_the_next_prompt_works(server: ComfyUI, body: dict):
    ranks = sampled(server, 1)
    held = sum(rank.memory_info().rss for rank in ranks)
    asked = time.monotonic()
    server.post("/free", body)
    assert len(ranks) == 2 and gone(ranks, 10.0) == []
    print(f"{held >> 20} MiB of two ranks were given back in {time.monotonic() - asked:.2f} s")
    run = server.run(picture(SAMPLER={"seed": 2, "steps": 1}))
    assert run.end.kind == "execution_success" and loads(run)


def test_a_free_that_asks_for_nothing_frees_nothing(server: ComfyUI):
    ranks = sampled(server, 3)
    server.post("/free", {"unload_models": False})
    run = server.run(picture(SAMPLER={"seed": 4, "steps": 1}))
    assert loads(run) == [] and server.ranks() == ranks


def test_a_node_of_comfyui_that_runs_out_of_memory_has_ours_freed(server: ComfyUI):
    ranks = sampled(server, 5)
    prompt = picture(SAMPLER={"seed": 5, "steps": 1})
    prompt["20"] = {"class_type": "RunsOut", "inputs": {"latent": [SAMPLER, 0]}}
    run = server.run(prompt)
    assert run.error["node_type"] == "RunsOut" and gone(ranks, 10.0) == []
    assert sampled(server, 6)


def test_what_each_rank_has_loaded_is_in_the_text_of_each_node(server: ComfyUI):
    run = server.run(picture(SAMPLER={"seed": 7, "steps": 1}))
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
