"""From a plain model to a file in 4 bits, Linear by Linear, in steps that a job started again finds done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..checkpoint import build_transformer
from ..errors import Refused
from ..inspection import ModelFacts, inspect_model
from ..mesh import Mesh
from ..pipeline import Pipeline
from ..progress import ReportProgress
from ..quant.svdquant.formats import INT4, NVFP4, UNSIGNED_INT4, Format
from ..quant.svdquant.making import packed_linear
from ..quant.svdquant.packing import grown, padded
from ..quant.svdquant.tensors import Packing
from ..settings import ModelSettings
from ..stored import SVDQUANT_INT4, SVDQUANT_NVFP4
from .inputs import input_file, keep_inputs, read_inputs
from .layer import Fitted, fit_linear, nearest_error
from .weights import Entry, Weights, write_tensors

STAGE = "quantizing"
FORMATS = {SVDQUANT_INT4: INT4, SVDQUANT_NVFP4: NVFP4}
DTYPE = torch.bfloat16
"""Of scales, vectors and low-rank matrices."""
HELD_BACK = 4
"""One of so many inputs is not fitted to, but for the report."""
CALIBRATED, JOB, REPORT = "calibrated", "job.json", "report"


@dataclass(frozen=True)
class QuantizeSettings:
    """What a job makes of a model; `stamp` changes when the model's files do."""

    model: str
    kind: str
    rank: int
    prompts: tuple[str, ...]
    latent: tuple[int, ...]
    steps: int
    tokens: int
    dtype: str = "auto"
    stamp: str = ""


@dataclass(frozen=True)
class LayerReport:
    """The error of one Linear on held-back inputs, beside that of rounding to the nearest; and what it takes."""

    name: str
    error: float
    error_nearest: float
    bytes: int
    bytes_plain: int


def quantize(settings: QuantizeSettings, out: Path, *, progress: ReportProgress) -> list[LayerReport]:
    """Write `out`, and beside it, until that is done, a folder of what is ready. Raises `Refused` when another job's is there."""
    facts = inspect_model(settings.model)
    if facts.stored:
        raise Refused(f"{facts.name} is quantised already: choose the bf16 file of the model")
    if facts.transformer_2 is not None:
        raise Refused(
            f"{facts.name} has two experts: quantise its transformer folder and its transformer_2 folder each"
        )
    folder = out.with_name(f"{out.name}.parts")
    _begin(folder, settings)
    model, shapes = build_transformer(facts)
    linears = facts.spec.packed_linears(
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    )
    del model
    if not (folder / CALIBRATED).exists():
        _calibrate(settings, folder, [names[0] for names in linears.values()], progress)
    with Weights(facts, shapes) as weights:
        reports = [
            _done(folder, name) or _quantize_one(settings, facts, folder, name, linears[name], weights)
            for name in _told(linears, progress)
        ]
        _assemble(settings, facts, folder, out, linears, weights)
    shutil.rmtree(folder)
    return reports


def _begin(folder: Path, settings: QuantizeSettings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    job, wanted = folder / JOB, json.dumps(asdict(settings), sort_keys=True)
    if job.exists() and job.read_text(encoding="utf-8") != wanted:
        raise Refused(f"{folder} has parts of another job: finish that one with its own settings, or delete the folder")
    job.write_text(wanted, encoding="utf-8")


def _calibrate(settings: QuantizeSettings, folder: Path, linears: Sequence[str], progress: ReportProgress) -> None:
    model = ModelSettings(model=settings.model, dtype=settings.dtype)
    pipeline = Pipeline.load(model, mesh=Mesh.single(), progress=progress)
    keep_inputs(
        pipeline,
        linears,
        folder,
        settings=model,
        prompts=settings.prompts,
        latent=settings.latent,
        steps=settings.steps,
        tokens=settings.tokens,
        progress=progress,
    )
    (folder / CALIBRATED).touch()


def _told(linears: Mapping[str, object], progress: ReportProgress) -> Iterator[str]:
    for number, name in enumerate(linears):
        progress(STAGE, number, len(linears))
        yield name
    progress(STAGE, len(linears), len(linears))


def _done(folder: Path, name: str) -> LayerReport | None:
    report = folder / f"{name}.{REPORT}"
    return LayerReport(**json.loads(report.read_text(encoding="utf-8"))) if report.exists() else None


def _quantize_one(
    settings: QuantizeSettings, facts: ModelFacts, folder: Path, name: str, linears: Sequence[str], weights: Weights
) -> LayerReport:
    weight = torch.cat([weights.read(f"{linear}.weight").float() for linear in linears])
    inputs = read_inputs(folder, linears[0], weight.shape[1])
    form = _form(settings, facts, linears[0])
    rank, (n, k) = min(settings.rank, min(weight.shape) // 16 * 16), weight.shape
    weight, inputs = (grown(tensor, (len(tensor), _whole_groups(k, form))) for tensor in (weight, inputs))
    held_back = inputs[: len(inputs) // HELD_BACK] if len(inputs) >= HELD_BACK else inputs
    fitted = fit_linear(weight, inputs[len(inputs) // HELD_BACK :], form=form, rank=rank)
    tensors = _tensors(fitted, Packing(n, k, rank, form), _bias(linears, weights))
    save_file(tensors, folder / f"{name}.safetensors")
    report = LayerReport(
        name=name,
        error=fitted.error_on(held_back, weight, form=form),
        error_nearest=nearest_error(weight, held_back, form=FORMATS[settings.kind]),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        bytes_plain=n * k * DTYPE.itemsize,
    )
    (folder / f"{name}.{REPORT}").write_text(json.dumps(asdict(report)), encoding="utf-8")
    input_file(folder, linears[0]).unlink()
    return report


def _form(settings: QuantizeSettings, facts: ModelFacts, linear: str) -> Format:
    form = FORMATS[settings.kind]
    return UNSIGNED_INT4 if form is INT4 and facts.spec.follows_gelu(linear) else form


def _whole_groups(k: int, form: Format) -> int:
    return k if k % form.group == 0 else padded(k)


def _bias(linears: Sequence[str], weights: Weights) -> torch.Tensor | None:
    biases = [weights.read(name) for linear in linears if (name := f"{linear}.bias") in weights.names]
    return torch.cat(biases).float() if biases else None


def _tensors(fitted: Fitted, packing: Packing, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What a file has of a Linear."""
    packed = packed_linear(
        fitted.rounded, fitted.up, fitted.down[:, : packing.k], fitted.smooth[: packing.k], packing, DTYPE
    )
    packed["smooth_factor_orig"] = packed["smooth_factor"].clone()
    if bias is not None:
        packed["bias"] = packing.packed("bias", (bias + fitted.bias).to(DTYPE))
    return {leaf: tensor.contiguous() for leaf, tensor in packed.items()}


def _assemble(
    settings: QuantizeSettings,
    facts: ModelFacts,
    folder: Path,
    out: Path,
    linears: Mapping[str, Sequence[str]],
    weights: Weights,
) -> None:
    """The one file: the 4-bit Linears, and all else as it was."""
    quantised = {f"{linear}.{leaf}" for names in linears.values() for linear in names for leaf in ("weight", "bias")}
    entries: list[Entry] = []
    places: dict[str, Path] = {}
    for name in linears:
        part = folder / f"{name}.safetensors"
        tensors = {f"{name}.{leaf}": tensor for leaf, tensor in load_file(part).items()}
        entries += [(full, tensor.dtype, tuple(tensor.shape)) for full, tensor in tensors.items()]
        places |= dict.fromkeys(tensors, part)
    for name in weights.names:
        if name not in quantised:
            tensor = weights.read(name)
            entries.append((name, tensor.dtype, tuple(tensor.shape)))

    def read(name: str) -> torch.Tensor:
        if name not in places:
            return weights.read(name)
        with safe_open(places[name], framework="pt") as file:
            return file.get_tensor(name.rpartition(".")[2])

    partial = out.with_name(f"{out.name}.partial")
    write_tensors(partial, entries, read, metadata=_metadata(settings, facts))
    partial.replace(out)


def _metadata(settings: QuantizeSettings, facts: ModelFacts) -> dict[str, str]:
    """As Nunchaku's files have it."""
    form = FORMATS[settings.kind]
    rounding = {
        "dtype": "fp4_e2m1_all" if form.is_float else "int4",
        "scale_dtype": "fp8_e4m3_nan" if form.is_float else None,
        "group_size": form.group,
    }
    weight = {**rounding, "scale_dtype": [None, "fp8_e4m3_nan"] if form.is_float else None}
    quantization = {"method": "svdquant", "weight": weight, "activation": rounding, "rank": settings.rank}
    config = {"_class_name": facts.spec.transformer_class, **facts.config}
    return {
        "model_class": facts.spec.transformer_class,
        "config": json.dumps(config),
        "quantization_config": json.dumps(quantization),
    }
