"""The pack as a real ComfyUI sees it: loading, schemas, help pages, templates."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui import PACK, ROOT, ComfyUI, Refused
from tests.graphs import PLAN, WORKFLOWS, picture, template

pytestmark = pytest.mark.comfy

NODE_INPUTS = {
    "OutriggerLoadModel": "model* dtype quant text_encoder text_encoder_2 vae parallel memory speed "
    "model_low_noise boundary text_encoder_3",
    "OutriggerLora": "model* lora_name* strength_model fuse strength_clip expert",
    "OutriggerParallelism": "devices ulysses ring tensor cfg data",
    "OutriggerMemory": "offload resident_blocks prefetch text_encoder_device vae_device fetch",
    "OutriggerTextEncode": "model* text*",
    "OutriggerSampler": "model* positive* latent_image* seed steps cfg sampler_name scheduler negative denoise shift max_shift base_shift",
    "OutriggerSamplerAdvanced": "model* positive* latent_image* add_noise noise_seed steps cfg sampler_name scheduler negative "
    "start_at_step end_at_step return_with_leftover_noise sigmas noise shift max_shift base_shift middle cfg_middle "
    "empty_conditioning neg_scale",
    "OutriggerDecode": "model* samples*",
    "OutriggerEncode": "model* pixels*",
    "OutriggerVerify": "model* positive* latent_image* negative",
}
"""Inputs of each node in ComfyUI's order (required ones first); the ones marked * are required. Append only."""

OUTPUTS = {
    "OutriggerLoadModel": ["OUTRIGGER_MODEL"],
    "OutriggerLora": ["OUTRIGGER_MODEL"],
    "OutriggerParallelism": ["OUTRIGGER_PARALLEL"],
    "OutriggerMemory": ["OUTRIGGER_MEMORY"],
    "OutriggerTextEncode": ["CONDITIONING"],
    "OutriggerSampler": ["LATENT"],
    "OutriggerSamplerAdvanced": ["LATENT"],
    "OutriggerDecode": ["IMAGE"],
    "OutriggerEncode": ["LATENT"],
    "OutriggerVerify": ["STRING"],
}
NEWER_SAMPLERS = {"exp_heun_2_x0", "exp_heun_2_x0_sde"}
"""Not yet in the oldest ComfyUI that the pack runs in."""

UI_ONLY = ("MarkdownNote",)
STANDARD = ("sys",)
TEMPLATES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))


FINDS_TOUCHED = """
import functools, importlib, sys
import utils.install_util  # before nodes.py makes comfy/utils.py stand for it
import comfy.options
names, sys.argv = sys.argv[2:], sys.argv[:2]
comfy.options.enable_args_parsing()
def found(name):
    module, _, attributes = name.partition(":")
    return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))
missing = []
for name in names:
    try:
        found(name)
    except AttributeError:
        missing.append(name)
print(missing)
"""


def touched() -> list[str]:
    """What `nodes/host.py` reads of ComfyUI's modules, as "module:attribute.attribute"."""
    tree = ast.parse((ROOT / "nodes" / "host.py").read_text(encoding="utf-8"))
    modules = [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    chains = {chain for chain in chains if re.fullmatch(r"[\w.]+", chain)}
    found = [(m, c[len(m) + 1 :]) for c in chains for m in modules if c.startswith(f"{m}.") and m not in STANDARD]
    assert len(found) > 10
    return [f"{module}:{attributes}" for module, attributes in sorted(found)]


def info(comfyui: ComfyUI, node: str) -> dict[str, Any]:
    """A node as ComfyUI tells the browser about it."""
    return comfyui.get(f"/object_info/{node}")[node]


def widgets(description: dict[str, Any]) -> list[str]:
    """Names of a node's widgets in order, None for the one that follows a seed."""
    names: list[str] = []
    for group in ("required", "optional"):
        for name, (kind, *further) in description["input"].get(group, {}).items():
            options = further[0] if further else {}
            if isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
                names += [name, ""] if options.get("control_after_generate") else [name]
    return names


@pytest.mark.parametrize("node", NODE_INPUTS)
def test_node_has_its_inputs_for_ever_and_explains_each(comfyui: ComfyUI, node: str):
    described = info(comfyui, node)
    required, optional = (described["input"].get(group, {}) for group in ("required", "optional"))
    assert " ".join([f"{name}*" for name in required] + list(optional)) == NODE_INPUTS[node]
    assert described["output"] == OUTPUTS[node]
    assert described["display_name"].startswith("Outrigger ")
    assert described["category"] == "Outrigger"
    assert len(described["description"]) > 40
    assert all(len(options.get("tooltip", "")) > 20 for _, options in {**required, **optional}.values())
    assert all(len(tooltip) > 20 for tooltip in described["output_tooltips"])
    sockets = (
        "model",
        "parallel",
        "memory",
        "speed",
        "positive",
        "negative",
        "middle",
        "empty_conditioning",
        "latent_image",
        "samples",
        "sigmas",
        "noise",
        "strength_clip",
    )
    assert all("default" in options for name, (_, options) in optional.items() if name not in sockets)


@pytest.mark.parametrize("node", NODE_INPUTS)
def test_help_page_is_served_and_names_every_input(comfyui: ComfyUI, node: str):
    with urllib.request.urlopen(f"{comfyui.url}/extensions/{PACK}/docs/{node}.md") as answer:
        page = answer.read().decode()
    missing = [name for name in NODE_INPUTS[node].replace("*", "").split() if f"`{name}`" not in page]
    assert missing == []


@pytest.mark.parametrize(
    ("node", "stock_node", "numbers"),
    [
        ("OutriggerSampler", "KSampler", ("seed", "steps", "cfg", "denoise")),
        (
            "OutriggerSamplerAdvanced",
            "KSamplerAdvanced",
            ("noise_seed", "steps", "cfg", "start_at_step", "end_at_step"),
        ),
    ],
)
def test_sampler_has_ksamplers_widgets_in_ksamplers_order_and_bounds(
    comfyui: ComfyUI, node: str, stock_node: str, numbers: tuple[str, ...]
):
    ours, theirs = info(comfyui, node), info(comfyui, stock_node)
    branches = ["cfg_middle", "neg_scale"] if node == "OutriggerSamplerAdvanced" else []
    appended = ["shift", "max_shift", "base_shift", *branches]
    assert widgets(ours) == [*widgets(theirs), *appended]
    options = {name: spec[1] for group in ours["input"].values() for name, spec in group.items() if len(spec) > 1}
    for name in numbers:
        stock = theirs["input"]["required"][name][1]
        bounds = [key for key in ("min", "max", "step", "round") if key in stock]
        assert {key: options[name].get(key) for key in bounds} == {key: stock[key] for key in bounds}
    for name in ("sampler_name", "scheduler"):
        kind, *stock = theirs["input"]["required"][name]
        known = set(kind if isinstance(kind, list) else stock[0]["options"])
        assert set(options[name]["options"]) - NEWER_SAMPLERS <= known


def test_pack_loads_without_a_complaint(comfyui: ComfyUI):
    log = comfyui.log.read_text(encoding="utf-8", errors="replace")
    (seconds,) = re.findall(rf"([\d.]+) seconds: .*custom_nodes.{PACK}\n", log)
    print(f"ComfyUI says that loading the pack took {seconds} s")
    assert not re.search(rf"(IMPORT FAILED|Cannot import).*custom_nodes.{PACK}", log)


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_is_listed_with_its_picture(comfyui: ComfyUI, name: str):
    assert name in comfyui.get("/workflow_templates")[PACK]
    address = f"{comfyui.url}/api/workflow_templates/{PACK}/{name}"
    with urllib.request.urlopen(f"{address}.jpg") as answer:
        assert answer.read(2) == b"\xff\xd8"
    assert comfyui.get(f"/api/workflow_templates/{PACK}/{name}.json")["version"] == 0.4


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_and_its_api_twin_are_the_same_graph(comfyui: ComfyUI, name: str):
    graph = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    assert as_prompt(graph, comfyui) == template(name)


@pytest.mark.parametrize("path", sorted((WORKFLOWS / "api").glob("*.json")), ids=lambda path: path.name)
def test_api_workflow_fits_the_nodes(comfyui: ComfyUI, path: Path):
    prompt = json.loads(path.read_text(encoding="utf-8"))
    for entry in prompt.values():
        described = info(comfyui, entry["class_type"])["input"]
        required, known = (
            described.get("required", {}),
            {**described.get("required", {}), **described.get("optional", {})},
        )
        assert set(required) <= set(entry["inputs"]) <= set(known), entry["class_type"]
        for value in (value for value in entry["inputs"].values() if isinstance(value, list)):
            assert prompt[value[0]]


def test_stock_nodes_stand_in_for_ours(comfyui: ComfyUI):
    kinds = {entry["class_type"] for entry in template("stock_nodes").values()}
    assert {"CLIPTextEncode", "EmptyHunyuanLatentVideo", "VAEDecode", "SaveImage"} <= kinds
    assert kinds & set(NODE_INPUTS) == {"OutriggerLoadModel", "OutriggerParallelism", "OutriggerSampler"}


def test_everything_internal_that_the_nodes_touch_is_there(comfyui_tree: Path):
    run = subprocess.run(
        [sys.executable, "-c", FINDS_TOUCHED, "--cpu", *touched()],
        cwd=comfyui_tree, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.stdout.strip().splitlines()[-1:] == ["[]"], run.stdout + run.stderr


def test_without_pyzmq_comfyui_shows_the_nodes_and_running_one_says_what_to_install(comfyui_tree: Path, tmp_path: Path):
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / "zmq.py").write_text("raise ModuleNotFoundError('No module named zmq', name='zmq')")
    paths = os.pathsep.join([str(tmp_path / "hides"), os.environ.get("PYTHONPATH", "")])
    with ComfyUI(comfyui_tree, tmp_path, environment={"PYTHONPATH": paths}) as server:
        assert set(NODE_INPUTS) <= set(server.get("/object_info"))
        with pytest.raises(Refused) as refusal:
            server.queue(picture())
        assert "-m pip install -r" in refusal.value.details(PLAN)
        model = {"class_type": "OutriggerLoadModel", "inputs": {"model": "tiny-shapes"}}
        show = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
        error = server.run({"1": model, "2": show}).error
    assert error["exception_type"] == "outrigger.MissingPackages"
    assert "-m pip install -r" in error["exception_message"].splitlines()[0]


def test_versions_agree():
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert f'__version__ = "{version}"' in (ROOT / "runtime" / "__init__.py").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in TEMPLATES:
        nodes = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))["nodes"]
        ours = [node["properties"] for node in nodes if node["type"] in NODE_INPUTS]
        assert all((each["cnr_id"], each["ver"]) == (PACK, version) for each in ours)


def as_prompt(graph: dict[str, Any], comfyui: ComfyUI) -> dict[str, Any]:
    """A UI graph in API form, as the browser makes it."""
    links = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    return {
        str(node["id"]): {
            "class_type": node["type"],
            "inputs": _values(node, info(comfyui, node["type"]))
            | {each["name"]: links[each["link"]] for each in node["inputs"] if each["link"] is not None},
            "_meta": {"title": node["title"]},
        }
        for node in graph["nodes"]
        if node["type"] not in UI_ONLY
    }


def _values(node: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """A newer ComfyUI may have given a stock node optional widgets at its end, which a graph may leave out."""
    names, values = widgets(described), node["widgets_values"]
    added = names[len(values) :]
    assert len(values) <= len(names) and set(added) <= described["input"].get("optional", {}).keys(), (
        f"{node['type']}: {names}"
    )
    assert not added or node["type"] not in NODE_INPUTS
    return {name: value for name, value in zip(names, values, strict=False) if name}
