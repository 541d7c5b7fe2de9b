"""Who may import whom: the arrows of the design, and what is imported nowhere."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CONTROL = (
    "errors",
    "units",
    "host_memory",
    "out_of_memory",
    "comparison",
    "settings",
    "chosen_part",
    "rank_settings",
    "message",
    "reports",
    "controls",
    "protocol",
    "folders",
    "pool",
    "environment",
    "channel",
)
"""Lowest first: each may import those before it. Over them stand, beside each other, the client and the server's side."""
COMPUTE = (
    "free_memory",
    "release",
    "own_memory",
    "weighing",
    "mesh",
    "parallel",
    "agreement",
    "quant",
    "sequence",
    "offload",
    "blocks",
    "regions",
    "guidance",
    "replicas",
    "linear",
    "gguf_file",
    "read_ahead",
    "reading",
    "checkpoint",
    "finite",
    "sampling",
    "encoders",
    "number_formats",
    "components",
    "room",
    "steps",
    "pipeline",
    "shelf",
)
FACTS = (
    "loaded_files",
    "families",
    "safetensors_header",
    "file_names",
    "json_file",
    "weight_files",
    "gguf_header",
    "stored",
    "layouts",
    "weight_formats",
    "facts",
    "nunchaku_file",
    "nunchaku_names",
    "model_folder",
    "inspection",
    "without_spec",
    "experts",
    "text_files",
    "parts",
    "machine",
    "areas",
    "workload",
    "degrees",
    "lora.formats",
    "lora.names",
    "lora.size",
    "temporaries",
    "moments",
    "linear_calls",
    "activations",
    "needs",
    "gain",
    "reason",
    "plan_devices",
    "plan",
    "part_sizes",
    "asked_room",
)
"""Read without torch, by the server as well."""
NODES_MAY_IMPORT = {"runtime", "runtime.settings", "runtime.protocol", "runtime.client", "runtime.errors"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec"}
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server", "execution"}
WITHOUT_TORCH = (*CONTROL, "launch", "client", "jobs", "executor", "ranks", "server", "commands", "__main__", *FACTS)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_of(path): path
    for path in [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "nodes").rglob("*.py"), ROOT / "__init__.py"]
    if path.exists()
}


def typing_only(tree):
    """The imports under `if TYPE_CHECKING`: they bind nothing when the program runs."""
    tests = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    return {id(inner) for test in tests for inner in ast.walk(test)}


def imports_of(name, *, top_level=False):
    """Full names of what a module imports; with `top_level` only what its own import brings in."""
    path = SOURCES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = typing_only(tree)
    nodes = tree.body if top_level else ast.walk(tree)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{stem}.{alias.name}" if f"{stem}.{alias.name}" in SOURCES else stem for alias in node.names)
    return found


def ours(name, **options):
    return {imported for imported in imports_of(name, **options) if imported in SOURCES and imported != name}


def part_of(module):
    """`runtime.parallel.ulysses` -> `parallel`."""
    return module.split(".")[1] if module.startswith("runtime.") else ""


def reached(name, **options):
    seen, waiting = set(), [name]
    while waiting:
        for imported in ours(waiting.pop(), **options) - seen:
            seen.add(imported)
            waiting.append(imported)
    return seen


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_module_reaches_itself(name):
    assert name not in reached(name), f"{name} is in an import cycle"


@pytest.mark.parametrize(
    "stack", [CONTROL, (*CONTROL, "ranks", "jobs", "executor", "server"), (*CONTROL, "launch", "client")]
)
def test_no_arrow_points_up_in_the_control_stack(stack):
    for place, part in enumerate(stack):
        if f"runtime.{part}" not in SOURCES:
            continue
        upward = {part_of(module) for module in ours(f"runtime.{part}")} & set(stack[place + 1 :])
        assert not upward, f"{part} imports {upward}"


def test_client_and_server_do_not_import_each_other():
    server_side = {"runtime.server", "runtime.executor", "runtime.ranks", "runtime.worker"}
    assert not reached("runtime.client") & server_side
    for module in server_side & set(SOURCES):
        assert "runtime.client" not in reached(module)


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if part_of(name) in (*COMPUTE, "families", "quant")))
def test_the_compute_stack_knows_no_socket(name):
    reaches = {part_of(module) for module in reached(name)}
    assert not reaches & {"channel", "client", "server", "executor", "ranks", "worker", "pool"}


def test_the_pipeline_is_imported_by_the_worker_and_the_tools_alone():
    importers = {name for name in SOURCES if "runtime.pipeline" in ours(name)}
    assert not {part_of(name) for name in importers} & {
        *CONTROL,
        *FACTS,
        *COMPUTE,
        "client",
        "server",
        "executor",
        "ranks",
    }


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name.startswith("runtime.families.")))
def test_families_are_plain_data(name):
    assert {part_of(module) for module in ours(name)} <= {"families"}


@pytest.mark.parametrize("part", [part for part in WITHOUT_TORCH if f"runtime.{part}" in SOURCES])
def test_what_the_server_imports_brings_in_no_torch(part):
    for module in {f"runtime.{part}", *reached(f"runtime.{part}", top_level=True)}:
        tops = {name.split(".")[0] for name in imports_of(module, top_level=True)}
        assert not tops & {"torch", "diffusers", "transformers", "numpy"}, (
            f"{part} reaches {module}, which imports {tops}"
        )


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name.split(".")[0] == "nodes"))
def test_nodes_import_the_runtime_only_where_it_meets_them(name):
    runtime = {module for module in ours(name) if module.split(".")[0] == "runtime"}
    assert runtime <= NODES_MAY_IMPORT
    assert not {module.split(".")[0] for module in imports_of(name)} & {"diffusers", "transformers"}


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name.split(".")[0] == "runtime"))
def test_the_runtime_knows_no_comfyui(name):
    assert not {module.split(".")[0] for module in imports_of(name) if module not in SOURCES} & COMFYUI


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_is_evaluated_or_unpickled(name):
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    assert not {module.split(".")[0] for module in imports_of(name)} & FORBIDDEN_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") not in FORBIDDEN_CALLS, f"{name}:{node.lineno}"
            assert not any(k.arg == "shell" for k in node.keywords), f"{name}:{node.lineno}"


def test_a_server_that_was_imported_has_no_torch(run_python):
    assert run_python("import sys, runtime.server, runtime.client; print('torch' in sys.modules)").strip() == "False"


@pytest.fixture
def run_python():
    import subprocess

    def run(program):
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, text=True, check=True, capture_output=True
        ).stdout

    return run
