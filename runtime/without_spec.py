"""Diffusers folders of architectures that no family describes: they run on one rank, through diffusers' own pipeline.

What such a folder is, and what is refused of it and of the settings, is found out here without torch and before a weight
is read. Only classes of diffusers and transformers are used, and no program that a folder may hold is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comparison import tolerance_for
from .errors import Refused
from .families import FAMILIES
from .file_names import PICKLED
from .inspection import RANDOM
from .json_file import read_json
from .machine import Machine
from .model_folder import INDEX
from .safetensors_header import read_header
from .settings import TINY_SHAPES, ModelSettings
from .weight_files import DIFFUSERS, TRANSFORMERS, all_weight_files, variant_of
from .weight_formats import check_formats

STEMS: Mapping[str, str] = {"diffusers": DIFFUSERS, "transformers": TRANSFORMERS}
"""What the libraries whose classes are used call their weights."""
LIBRARIES = tuple(STEMS)
FLOATING = (".weight", ".bias")
"""Tensors that are numbers of a layer, and no tables that it counts with."""
LOADED_BY = "config.json"
"""How the files end that say which class of a library reads a part."""
WEIGHTS = "*.safetensors"
DECODER, SOUND = "vae", ("audio_vae", "vocoder")
"""The part whose input is the latent, and those that make a sound of another."""
REST = "choose a model with a family of its own for that"


@dataclass(frozen=True)
class OwnPipeline:
    """A folder that diffusers' class `kind` runs. `nbytes` is what its weights take in their files, and `variant` the one that
    there is of some of them alone; None where there is none.
    """

    path: Path
    kind: str
    nbytes: int
    variant: str | None = None

    @property
    def name(self) -> str:
        """The folder's own."""
        return self.path.name


def pipeline_without_spec(model: str) -> OwnPipeline | None:
    """What is at a path when it is the folder of a pipeline that no family describes; None for everything else.

    Raises `Refused` for one that brings programs, or weights that are no safetensors.
    """
    if model == TINY_SHAPES or model.startswith(RANDOM) or not os.path.isfile(os.path.join(model, INDEX)):
        return None
    path = Path(model)
    index = read_json(path / INDEX)
    kind = index.get("_class_name")
    parts = {name: entry for name, entry in index.items() if not name.startswith("_") and isinstance(entry, list)}
    if _is_of_a_family(kind, parts):
        return None
    _check_no_programs(path, kind, parts)
    _check_decoders(path, kind, parts)
    stems = {path / name: STEMS[library] for name, (library, _) in parts.items() if library is not None}
    files = {file: stem for folder, stem in stems.items() for file in _weights(folder, stem)}
    variant = next((found for file, stem in files.items() if (found := variant_of(file, stem))), None)
    return OwnPipeline(path, kind, sum(file.stat().st_size for file in files), variant)


def _is_of_a_family(kind: Any, parts: Mapping[str, list]) -> bool:
    transformer = parts.get("transformer", [None, None])[-1]
    return any(
        kind in family.pipeline_classes or transformer == family.transformer_class for family in FAMILIES.values()
    )


def _check_no_programs(path: Path, kind: Any, parts: Mapping[str, list]) -> None:
    """Raise `Refused` where classes of the folder's own are asked for, or a file could be taken for one."""
    for name, entry in {"_class_name": [LIBRARIES[0], kind], **parts}.items():
        library, *classes = entry
        if library is None and classes == [None]:
            continue
        if library not in LIBRARIES or not all(isinstance(each, str) for each in classes) or len(classes) != 1:
            raise Refused(
                f"{path / INDEX} names {entry} as {name}: only classes of {' and '.join(LIBRARIES)} are run. Choose a folder "
                f"that needs no program of its own"
            )
    program = next(_programs(path), None)
    if program is not None:
        raise Refused(f"{program} is a program, and none is ever run: choose a folder without one, or take it out")


def _check_decoders(path: Path, kind: Any, parts: Mapping[str, list]) -> None:
    """Raise `Refused` where pictures are not what a VAE makes of one latent, and nothing beside them."""
    there = [name for name, entry in parts.items() if entry[-1] is not None]
    if DECODER not in there:
        raise Refused(
            f"{path} is a {kind}, which has no part named {DECODER} that makes pictures of a latent: choose another model"
        )
    sound = next((name for name in SOUND if name in there), "")
    if sound:
        raise Refused(
            f"{path} is a {kind}, which makes sound as well ({sound}), and a LATENT here has none: choose another model"
        )


def _programs(path: Path) -> Iterator[Path]:
    """Files that a library could run, and configurations that tell it to."""
    yield from path.rglob("*.py")
    yield from (file for file in path.glob(f"*/*{LOADED_BY}") if "auto_map" in read_json(file))


def _weights(folder: Path, stem: str) -> list[Path]:
    """The files with the weights of a part; none for one without. Raises `Refused` for a part that is missing, pickled or no
    floats.
    """
    if not folder.is_dir():
        raise Refused(f"{folder} is missing: the model folder is not complete, download it again")
    files = list(folder.glob(WEIGHTS))
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled and not files:
        raise Refused(
            f"{folder} has no .safetensors weights ({pickled[0]} is a pickle, which can run code and is never opened): "
            f"download them"
        )
    files = all_weight_files(folder, stem) if files else []
    for file in files:
        check_formats(file, {name: each.dtype for name, each in read_header(file).items() if name.endswith(FLOATING)})
    return files


def check_alone(found: OwnPipeline, settings: ModelSettings) -> None:
    """Raise `Refused`, with its name, for the first setting that a pipeline of diffusers' own cannot honour."""
    parallel, memory = settings.parallel, settings.memory
    degree = next((f"{axis} {degree}" for axis, degree in parallel.set_degrees.items() if degree > 1), "")
    several = f"devices {parallel.devices}" if (parallel.device_count or 1) > 1 else ""
    default = ModelSettings(model=settings.model)
    for what, is_set, way_out in (
        (degree, bool(degree), "set it to 1 or 0"),
        (several, bool(several), f"choose one of them, such as {parallel.one_rank.devices}"),
        (f"quant {settings.quant}", settings.quant != default.quant, "set it to none"),
        ("a LoRA", bool(settings.loras), "remove Outrigger LoRA"),
        ("a memory setting", memory != default.memory, "disconnect Configure Memory"),
        ("text_encoder", settings.text_encoder != default.text_encoder, "leave it at 'from model'"),
        ("text_encoder_2", settings.text_encoder_2 != default.text_encoder_2, "leave it at 'from model'"),
        ("text_encoder_3", settings.text_encoder_3 != default.text_encoder_3, "leave it at 'from model'"),
        ("vae", settings.vae != default.vae, "leave it at 'from model'"),
        ("model_low_noise", bool(settings.model_low_noise), "leave it empty"),
        (f"boundary {settings.boundary:g}", bool(settings.boundary), "set it to 0"),
    ):
        if is_set:
            raise Refused(f"{what}: {why_alone(found)}, which does not have that: {way_out}, or {REST}")


def why_alone(found: OwnPipeline) -> str:
    """Why a model runs on one rank, in words."""
    return f"{found.name} has no family here and runs on one rank through diffusers' own {found.kind}"


def check_has_family(model: str, needed: str) -> None:
    """Raise `Refused` for a model without a family, where one is `needed`, in words."""
    found = pipeline_without_spec(model)
    if found is not None:
        raise Refused(f"{why_alone(found)}: {needed}")


def plan_alone(found: OwnPipeline, settings: ModelSettings, machine: Machine) -> dict[str, Any]:
    """What its plan of one rank says beside the degrees. Raises `Refused` as `check_alone`, and for a device that is not
    there.
    """
    check_alone(found, settings)
    device = _device(settings.parallel.devices, machine)
    dtype = {"cpu": "fp32"}.get(device, "bf16") if settings.dtype == "auto" else settings.dtype
    held = {"bytes_per_rank": found.nbytes, "tolerance": tolerance_for(dtype)}
    return {"devices": (device,), "reason": why_alone(found), **held}


def _device(devices: str, machine: Machine) -> str:
    present = len(machine.cuda)
    if devices == "auto":
        return "cuda:0" if present else "cpu"
    kind, _, number = devices.partition(":")
    if kind == "cuda" and int(number) >= present:
        raise Refused(f"{devices} is not there: this machine has {present or 'no'} GPU{'s'[: present != 1]}")
    return devices if kind == "cuda" else "cpu"
