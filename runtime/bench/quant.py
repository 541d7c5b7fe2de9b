"""What 4 bits cost: tiny-shapes made with SVDQuant and rounded to the nearest, beside itself; and the bytes of wide Linears."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..inspection import inspect_model
from ..linear import ParallelLinear
from ..mesh import Mesh
from ..pipeline import Pipeline
from ..progress import ignore_progress
from ..protocol import Sample
from ..quant.svdquant.formats import INT4
from ..quant.svdquant.making import on_load_rank, packed_linear, round_nearest
from ..quant.svdquant.tensors import Packing
from ..quantize.job import QuantizeSettings, quantize
from ..quantize.weights import Weights
from ..settings import TINY_SHAPES, ModelSettings, SampleSettings
from ..stored import SVDQUANT_INT4, Stored
from ..tiny_shapes.scenes import CALIBRATION, HELD_OUT

WIDTH, RANK = 3072, 32
PICTURES = 16
LATENT = (1, 16, 1, 16, 16)
STEPS = 20


def measure(*, pictures: int = PICTURES) -> dict[str, float]:
    """Median errors over the Linears, median PSNR over pictures, and bytes against bf16."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny-shapes.safetensors"
        reports = quantize(quantize_settings(), path, progress=ignore_progress)
        plain, four_bit = (
            Pipeline.load(_settings(model), mesh=Mesh.single(), progress=ignore_progress)
            for model in (TINY_SHAPES, str(path))
        )
        reference = draw(plain, plain, pictures)
        return {
            "rel_err_svdquant": statistics.median(report.error for report in reports),
            "rel_err_round_to_nearest": statistics.median(report.error_nearest for report in reports),
            "rel_err_ratio": statistics.median(report.error / report.error_nearest for report in reports),
            "bytes_ratio": bytes_ratio(),
            "psnr_db": _psnr(draw(plain, four_bit, pictures), reference),
            "psnr_db_round_to_nearest": _psnr(draw(plain, rounded_to_nearest(), pictures), reference),
        }


def described(figures: dict[str, float]) -> str:
    """The figures for a reader."""
    return (
        f"tiny-shapes, int4, rank {RANK}: error of a Linear {figures['rel_err_svdquant']:.4f}, rounded to the nearest "
        f"{figures['rel_err_round_to_nearest']:.4f}\npictures: {figures['psnr_db']:.1f} dB, rounded to the nearest "
        f"{figures['psnr_db_round_to_nearest']:.1f} dB\nbytes of a Linear of width {WIDTH}: {figures['bytes_ratio']:.3f} of bf16"
    )


def quantize_settings(**changes: Any) -> QuantizeSettings:
    """What `quantize --model tiny-shapes` makes."""
    settings = {
        "model": TINY_SHAPES, "kind": SVDQUANT_INT4, "rank": RANK, "prompts": CALIBRATION, "latent": LATENT,
        "steps": 8, "tokens": 2048,
    }  # fmt: skip
    return QuantizeSettings(**{**settings, **changes})


def bytes_ratio(width: int = WIDTH) -> float:
    """What a square 4-bit Linear holds, against its weight in bf16."""
    plain = nn.Linear(width, width, device="meta", dtype=torch.bfloat16)
    held = ParallelLinear(plain, stored=Stored(SVDQUANT_INT4)).core.parameters()
    return sum(parameter.nbytes for parameter in held) / plain.weight.nbytes


@torch.inference_mode()
def draw(coder: Pipeline, pipeline: Pipeline, count: int) -> torch.Tensor:
    """Pictures of the first held-out prompts, `(count, H, W, 3)` from 0 to 1; `coder` reads the prompts and decodes."""
    negative = coder.encode_text("", progress=ignore_progress)
    pictures = []
    for seed, prompt in enumerate(HELD_OUT[:count]):
        request = Sample(
            job="bench",
            model=ModelSettings(model=TINY_SHAPES),
            settings=SampleSettings(seed=seed, steps=STEPS),
            positive=(coder.encode_text(prompt, progress=ignore_progress),),
            negative=(negative,),
            latent=torch.zeros(LATENT),
        )
        pictures.append(coder.decode(pipeline.sample(request, progress=ignore_progress), progress=ignore_progress))
    return torch.cat(pictures)


def rounded_to_nearest() -> Pipeline:
    """tiny-shapes in 4 bits without smoothing, low rank or anything else that is found out: what SVDQuant is held against."""
    settings = _settings(TINY_SHAPES, quant=SVDQUANT_INT4)
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    facts = inspect_model(TINY_SHAPES, quant=SVDQUANT_INT4)
    with Weights(facts, {}) as weights:
        for name in facts.stored:
            weight = weights.read(f"{name}.weight").float()
            _place(pipeline.transformer.get_submodule(name), weight)
    return pipeline


def _place(layer: ParallelLinear, weight: torch.Tensor) -> None:
    n, k = weight.shape
    rank = on_load_rank(n, k)
    none = packed_linear(
        round_nearest(weight, INT4),
        weight.new_zeros(n, rank),
        weight.new_zeros(rank, k),
        weight.new_ones(k),
        Packing(n, k, rank, INT4),
        torch.float32,
    )
    for leaf, tensor in none.items():
        layer.core.place(leaf, tensor)


def _settings(model: str, **changes: Any) -> ModelSettings:
    return ModelSettings(model=model, **changes)


def _psnr(pictures: torch.Tensor, reference: torch.Tensor) -> float:
    errors = (pictures - reference).square().flatten(1).mean(1)
    return float((-10 * errors.log10()).median())
