"""From a plain model to a file in 4 bits, Linear by Linear, in steps that a job started again finds done."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..checkpoint import build_transformer
from ..errors import Refused
from ..families.written import PackedLinear
from ..inspection import ModelFacts, inspect_model
from ..layouts import block_spans
from ..loaded_files import LoadedFiles
from ..mesh import Mesh
from ..pipeline import Pipeline
from ..progress import ReportProgress
from ..quant.svdquant.formats import INT4, NVFP4, UNSIGNED_INT4, Format
from ..quant.svdquant.making import packed_linear
from ..quant.svdquant.packing import grown, padded
from ..quant.svdquant.tensors import Packing
from ..release import release_memory
from ..settings import MemorySettings, ModelSettings
from ..stored import SVDQUANT_INT4, SVDQUANT_NVFP4
from .file import DTYPE, assemble, metadata_of, part_file, round_modulations
from .inputs import input_file, keep_inputs, read_inputs
from .layer import Fitted, fit_linear, nearest_error
from .weights import Weights, write_whole

STAGE = "quantizing"
FORMATS = {SVDQUANT_INT4: INT4, SVDQUANT_NVFP4: NVFP4}
HELD_BACK = 4
"""One of so many inputs is not fitted to, but for the report."""
PROMPTS_OF_A_RUN = 2
"""The positive and the negative one, of each of which `tokens` inputs are kept."""
LARGE_BYTES = 1 << 30
ONE_BLOCK = MemorySettings(offload="disk", resident_blocks="0", prefetch="0")
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
    """Write `out`, and beside it, until that is done, a folder of what is ready. Raises `Refused` for a model that cannot be
    made one, when another job's folder is there, and when there is no room to write.
    """
    facts, folder = inspect_model(settings.model), out.with_name(f"{out.name}.parts")
    _check(facts, out)
    _begin(folder, settings)
    try:
        return _made(settings, facts, folder, out, progress)
    except OSError as error:
        reason = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        raise Refused(
            f"{reason}. What is done is kept in {folder}: mend that, and give the same command again"
        ) from error


def _check(facts: ModelFacts, out: Path) -> None:
    if facts.stored:
        raise Refused(f"{facts.name} is quantised already: choose the bf16 file of the model")
    if facts.transformer_2 is not None:
        raise Refused(
            f"{facts.name} has two experts: quantise its transformer folder and its transformer_2 folder each"
        )
    if out.exists() and any(out.samefile(source.path) for source in facts.sources):
        raise Refused(f"{out} is the model itself: name another file")


def _made(
    settings: QuantizeSettings, facts: ModelFacts, folder: Path, out: Path, progress: ReportProgress
) -> list[LayerReport]:
    form, files = FORMATS[settings.kind], LoadedFiles.of(source.path for source in facts.sources)
    model, shapes = build_transformer(facts)
    linears = facts.spec.packed_linears(
        {name: module.out_features for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    )
    del model
    if not (folder / CALIBRATED).exists():
        _calibrate(settings, facts, folder, sorted({packed.linears[0] for packed in linears.values()}), progress)
        release_memory()
    with Weights(facts, shapes) as weights:
        reports = [
            _done(folder, name) or _quantize_one(settings, facts, folder, name, linears[name], weights)
            for name in _told(linears, progress)
        ]
        modulations = round_modulations(facts, weights, folder)
        if changed := files.changed:
            raise Refused(f"{changed}, while it was quantised: delete {folder}, and give the same command again")
        assemble(out, folder, facts, weights, linears, modulations, metadata=metadata_of(facts, settings.rank, form))
    shutil.rmtree(folder)
    return reports


def _begin(folder: Path, settings: QuantizeSettings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    job, wanted = folder / JOB, json.dumps(asdict(settings), sort_keys=True)
    if job.exists() and job.read_text(encoding="utf-8") != wanted:
        raise Refused(f"{folder} has parts of another job: finish that one with its own settings, or delete the folder")
    _write(job, wanted)


def _write(path: Path, text: str) -> None:
    """All of it or, where this process is killed, nothing."""
    begun = path.with_name(f"{path.name}.begun")
    begun.write_text(text, encoding="utf-8")
    begun.replace(path)


def _calibrate(
    settings: QuantizeSettings, facts: ModelFacts, folder: Path, linears: Sequence[str], progress: ReportProgress
) -> None:
    """Runs of the model; of a large one a block at a time is in memory."""
    memory = ONE_BLOCK if facts.sources and _bytes_in_float32(facts) > LARGE_BYTES else MemorySettings()
    model = ModelSettings(model=settings.model, dtype=settings.dtype, memory=memory)
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


def _bytes_in_float32(facts: ModelFacts) -> int:
    """What the model would take as a processor runs it."""
    return 4 * sum(map(math.prod, facts.shapes.values()))


def _told(linears: Mapping[str, object], progress: ReportProgress) -> Iterator[str]:
    for number, name in enumerate(linears):
        progress(STAGE, number, len(linears))
        yield name
    progress(STAGE, len(linears), len(linears))


def _done(folder: Path, name: str) -> LayerReport | None:
    report = folder / f"{name}.{REPORT}"
    return LayerReport(**json.loads(report.read_text(encoding="utf-8"))) if report.exists() else None


def _quantize_one(
    settings: QuantizeSettings, facts: ModelFacts, folder: Path, name: str, packed: PackedLinear, weights: Weights
) -> LayerReport:
    weight, inputs = _weight_and_inputs(settings, facts, folder, packed, weights)
    form = _form(settings, facts, packed)
    rank, (n, k) = min(settings.rank, min(weight.shape) // 16 * 16), weight.shape
    weight, inputs = (grown(tensor, (len(tensor), _whole_groups(k, form))) for tensor in (weight, inputs))
    held_back = inputs[: len(inputs) // HELD_BACK] if len(inputs) >= HELD_BACK else inputs
    fitted = fit_linear(weight, inputs[len(inputs) // HELD_BACK :], form=form, rank=rank)
    tensors = _tensors(fitted, Packing(n, k, rank, form), _bias(packed, weights))
    write_whole(part_file(folder, name), tensors)
    report = LayerReport(
        name=name,
        error=fitted.error_on(held_back, weight, form=form),
        error_nearest=nearest_error(weight, held_back, form=FORMATS[settings.kind]),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        bytes_plain=n * k * DTYPE.itemsize,
    )
    _write(folder / f"{name}.{REPORT}", json.dumps(asdict(report)))
    if packed.part is None:  # those of a part are for the others too, and go with the folder
        input_file(folder, packed.linears[0]).unlink()
    return report


def _weight_and_inputs(
    settings: QuantizeSettings, facts: ModelFacts, folder: Path, packed: PackedLinear, weights: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(N, K)` as it is stored, but in float32 where it is stored in more, and `(T, K)`, of the inputs that are its own."""
    weight = torch.cat([weights.read(f"{linear}.weight") for linear in packed.linears])
    weight = weight.float() if weight.dtype == torch.float64 else weight
    inputs = read_inputs(folder, packed.linears[0], weight.shape[1], most=PROMPTS_OF_A_RUN * settings.tokens)
    if packed.part is None:
        return weight, inputs
    columns = block_spans(facts.spec.input_blocks(packed.linears[0]), weight.shape[1])[packed.part]
    return weight[:, columns].contiguous(), inputs[:, columns].contiguous()


def _form(settings: QuantizeSettings, facts: ModelFacts, packed: PackedLinear) -> Format:
    form, place = FORMATS[settings.kind], "" if packed.part is None else f"@{packed.part}"
    return UNSIGNED_INT4 if form is INT4 and facts.spec.follows_gelu(packed.linears[0] + place) else form


def _whole_groups(k: int, form: Format) -> int:
    return k if k % form.group == 0 else padded(k)


def _bias(packed: PackedLinear, weights: Weights) -> torch.Tensor | None:
    """What is added to the output; of parts the first has it."""
    biases = [weights.read(name) for linear in packed.linears if (name := f"{linear}.bias") in weights.names]
    if not biases:
        return None
    return torch.cat(biases).float() * (not packed.part)


def _tensors(fitted: Fitted, packing: Packing, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What a file has of a Linear."""
    packed = packed_linear(
        fitted.rounded, fitted.up, fitted.down[:, : packing.k], fitted.smooth[: packing.k], packing, DTYPE
    )
    packed["smooth_factor_orig"] = packed["smooth_factor"].clone()
    if bias is not None:
        packed["bias"] = packing.packed("bias", (bias + fitted.bias).to(DTYPE))
    return {leaf: tensor.contiguous() for leaf, tensor in packed.items()}
