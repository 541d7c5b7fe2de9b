"""The flags that commands share, and the settings they make: the same ones as the nodes'."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import Refused, in_our_words
from ..settings import (
    AUTO,
    AXES,
    BOTH_EXPERTS,
    COMPONENT_PLACES,
    DTYPES,
    EXPERTS,
    FETCH_KINDS,
    OFFLOAD_KINDS,
    QUANT_KINDS,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    ParallelSettings,
)
from .models import LORA_FOLDERS, find_file, find_model, tokenizers

Value = TypeVar("Value")
DEGREES = {"ulysses": "ulysses", "ring": "ring", "tensor": "tensor", "cfg-parallel": "cfg", "data": "data"}
"""Flag of each axis; `--cfg` is the guidance, as on the Sampler."""


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it is spread."""
    parser.add_argument(
        "--model", required=True, metavar="MODEL",
        help="a file or folder, a file name under a models folder, tiny-shapes, or random:FAMILY",
    )  # fmt: skip
    parser.add_argument(
        "--model-low-noise",
        default="",
        metavar="MODEL",
        help="the expert of low noise, where --model is that of high noise",
    )
    parser.add_argument(
        "--boundary", type=float, default=0.0, metavar="SIGMA", help="where it takes over; 0 for the model's own"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="number format of the weights")
    parser.add_argument("--quant", choices=QUANT_KINDS, default=QUANT_KINDS[0], help="quantisation of the weights")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="FILE[:STRENGTH[:EXPERT]]",
        help="a LoRA file, or its name under loras, how strongly it counts (1), and for one of two experts alone `high` or "
        "`low`; may be given several times",
    )  # fmt: skip
    parser.add_argument("--devices", default="auto", help="auto, cpu:4 or cuda:0,1")
    for flag, axis in DEGREES.items():
        parser.add_argument(f"--{flag}", dest=f"degree_{axis}", type=int, default=0, metavar="N", help=_help(axis))
    parser.add_argument(
        "--offload", choices=OFFLOAD_KINDS, default=OFFLOAD_KINDS[0],
        help="where the weights of the blocks are while they do not run: on the device, in host memory, in their file",
    )  # fmt: skip
    parser.add_argument(
        "--resident-blocks", default=AUTO, metavar="N", help="blocks that stay on the device: auto, 2, or 0.25 of them"
    )
    parser.add_argument("--prefetch", default="1", metavar="N", help="blocks on their way while one runs: 2, or 0.25")
    parser.add_argument(
        "--fetch", choices=FETCH_KINDS, default=AUTO,
        help="how ranks that share a picture get a block: each all of it, or each a part that they put together",
    )  # fmt: skip
    for part in ("text encoder", "VAE"):
        parser.add_argument(
            f"--{part.lower().replace(' ', '-')}-device", choices=COMPONENT_PLACES, default=AUTO,
            help=f"where the {part} is: on the device, on the processor, or read for each use and let go of after it",
        )  # fmt: skip


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Where flags come from and what is printed."""
    parser.add_argument("--config", metavar="FILE", help="flags by name, as YAML or JSON; flags given here win")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def model_settings(chosen: argparse.Namespace, **parts: str) -> ModelSettings:
    """The settings that the flags describe. Raises `Refused` in the user's words.

    Whether the degrees fit the devices is left to the planner: it knows the model, and so the nearest plan that works.
    """
    parallel = _parallel_settings(chosen)
    amounts = {"resident_blocks": str(chosen.resident_blocks), "prefetch": str(chosen.prefetch)}
    places = {name: getattr(chosen, name) for name in ("text_encoder_device", "vae_device", "fetch")}
    memory = checked(MemorySettings, offload=chosen.offload, **amounts, **places)
    loras = tuple(map(_lora_settings, chosen.lora))
    fields = {"dtype": chosen.dtype, "quant": chosen.quant, "loras": loras, "memory": memory}
    if chosen.model_low_noise:
        fields["model_low_noise"] = find_model(chosen.model_low_noise)
    fields["boundary"] = chosen.boundary
    model = checked(ModelSettings, model=find_model(chosen.model), tokenizers=tokenizers(), **fields, **parts)
    return model.model_copy(update={"parallel": parallel})


def checked(make: Callable[..., Value], **fields: Any) -> Value:
    """Settings of these fields. Raises `Refused` in the user's words."""
    try:
        return in_our_words(make, **fields)
    except ValueError as error:
        raise Refused(str(error)) from None


def _parallel_settings(chosen: argparse.Namespace) -> ParallelSettings:
    degrees = {axis: getattr(chosen, f"degree_{axis}") for axis in AXES}
    devices = checked(ParallelSettings, devices=chosen.devices).devices
    for axis, degree in degrees.items():
        checked(ParallelSettings, **{axis: degree})
    return ParallelSettings.model_construct(devices=devices, **degrees)


def _lora_settings(text: str) -> LoraSettings:
    """`FILE`, `FILE:STRENGTH` or `FILE:STRENGTH:high`; a file may have colons in its name."""
    name, _, word = text.rpartition(":")
    expert = next((expert for expert in EXPERTS if name and expert == f"{word} noise"), BOTH_EXPERTS)
    text = text if expert == BOTH_EXPERTS else name
    name, _, strength = text.rpartition(":")
    number = _number(strength) if name else None
    path = find_file(text if number is None else name, LORA_FOLDERS)
    if os.path.isdir(path):
        raise Refused(f"{path} is a folder: give a LoRA file in it")
    return checked(LoraSettings, path=path, strength=1.0 if number is None else number, expert=expert)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _help(axis: str) -> str:
    return f"degree of the {axis} axis; 0 has it chosen"
