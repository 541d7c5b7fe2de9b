"""Make a checkpoint in 4 bits (SVDQuant): weights and activations, and a low-rank branch."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..settings import TINY_SHAPES
from ..stored import SVDQUANT_INT4, SVDQUANT_NVFP4
from ..without_spec import check_has_family
from .flags import add_output_flags
from .models import find_model
from .output import check_can_write, show

KINDS = (SVDQUANT_INT4, SVDQUANT_NVFP4)
RANK_UNIT, MOST_RANK = 16, 512
SIZE, TINY_SIZE = 512, 128
MOST_STEPS, MOST_TOKENS, MOST_SIZE = 10000, 1 << 20, 16384
PROMPTS = (
    "a portrait of an old fisherman in soft window light",
    "a crowded street market at night in the rain, neon signs",
    "a watercolour of mountains above a lake",
    "macro photograph of a bee on a yellow flower",
    "an isometric drawing of a small wooden house",
    "a bowl of fruit on a white table, studio photograph",
    "a poster with the word HELLO in large letters",
    "a dog running on a beach at sunset",
)
"""For models that read English; `--prompts` gives others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to make, and from which runs."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="the plain model: as for the other commands")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="number format")
    parser.add_argument("--rank", type=int, default=32, help="rank of the low-rank branch, a multiple of 16")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts of the calibration runs, one in a line")
    parser.add_argument("--size", type=int, default=0, help="side of their pictures in pixels; 0 is the model's own")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--tokens", type=int, default=2048, help="inputs that are kept of each Linear")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help="of the runs")
    add_output_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Make the file; a started job goes on where it ended."""
    if chosen.rank not in range(RANK_UNIT, MOST_RANK + 1, RANK_UNIT):
        raise Refused(
            f"rank {chosen.rank} is not a multiple of {RANK_UNIT} up to {MOST_RANK}: choose 32, or 128 for less error"
        )
    if chosen.out.suffix != ".safetensors":
        raise Refused(f"{chosen.out}: the file's name has to end with .safetensors")
    check_can_write(chosen.out)
    from ..quantize.job import quantize
    from .bar import Bar

    settings = _settings(chosen)
    reports = quantize(settings, chosen.out, progress=Bar(quiet=chosen.json))
    answer = {"path": str(chosen.out.resolve()), "layers": [vars(report) for report in reports], **_totals(reports)}
    show(answer, described, as_json=chosen.json)
    return 0


def described(answer: dict[str, Any]) -> str:
    """The report of each layer, and of all."""
    width = max(len(layer["name"]) for layer in answer["layers"])
    lines = [
        f"{layer['name']:<{width}}  error {layer['error']:.4f}, rounded to the nearest {layer['error_nearest']:.4f}"
        for layer in answer["layers"]
    ]
    return "\n".join(
        [
            *lines,
            f"{answer['path']}: {len(lines)} Linears in {answer['bytes_ratio']:.3f} of their bytes in bf16; error "
            f"{answer['error_ratio']:.2f} of rounding to the nearest, in the median",
        ]
    )


def _settings(chosen: argparse.Namespace) -> Any:
    """What the flags ask for."""
    from ..inspection import inspect_model
    from ..quantize.job import QuantizeSettings

    model = find_model(chosen.model)
    check_has_family(
        model, "which of its Linears can be in 4 bits is not known: choose a model with a family of its own"
    )
    facts = inspect_model(model)
    form = facts.spec.latent
    side = (chosen.size or (TINY_SIZE if model == TINY_SHAPES else SIZE)) // form.spatial
    for name, value, least, most in (
        ("steps", chosen.steps, 1, MOST_STEPS),
        ("tokens", chosen.tokens, 1, MOST_TOKENS),
        ("size", side * form.spatial, form.spatial, MOST_SIZE),
    ):
        if not least <= value <= most:
            raise Refused(
                f"{name} {getattr(chosen, name)} does not lie between {least} and {most}: set it to one that does"
            )
    return QuantizeSettings(
        model=model,
        kind=chosen.kind,
        rank=chosen.rank,
        prompts=_prompts(chosen.prompts, model),
        latent=(1, form.channels, *([1] if form.dims == 3 else []), side, side),
        steps=chosen.steps,
        tokens=chosen.tokens,
        dtype=chosen.dtype,
        stamp=_stamp(model),
    )


def _prompts(path: Path | None, model: str) -> tuple[str, ...]:
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
        prompts = tuple(line.strip() for line in lines if line.strip())
        if not prompts:
            raise Refused(f"{path} has no prompt: write one in each line")
        return prompts
    if model != TINY_SHAPES:
        return PROMPTS
    from ..tiny_shapes.scenes import CALIBRATION

    return CALIBRATION


def _stamp(model: str) -> str:
    """Changes when a file of the model does."""
    from ..inspection import inspect_model

    return " ".join(f"{source.path} {source.path.stat().st_mtime_ns}" for source in inspect_model(model).sources)


def _totals(reports: list[Any]) -> dict[str, float]:
    return {
        "error_ratio": statistics.median(report.error / report.error_nearest for report in reports),
        "bytes_ratio": sum(report.bytes for report in reports) / sum(report.bytes_plain for report in reports),
    }
