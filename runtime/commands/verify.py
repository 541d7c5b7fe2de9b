"""Run one request on one rank and on the plan, and compare the latents; exit status 1 where they differ."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import Any

from ..comparison import Comparison
from ..inspection import inspect_model
from ..machine import Machine
from ..needs import USUAL_BRANCHES
from ..plan import plan_model
from .flags import add_model_flags, add_output_flags, model_settings
from .output import show
from .sampler import add_sampling_flags, sample_settings
from .sidecar import own_sidecar
from .sizes import size_of

STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how it is spread, and what is sampled."""
    add_model_flags(parser)
    add_sampling_flags(parser, steps=STEPS)
    add_output_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Print how far the plan is from one rank."""
    model, settings = model_settings(chosen), sample_settings(chosen)
    one_rank = model.model_copy(update={"parallel": model.parallel.one_rank})
    machine = Machine.here()
    plan, _ = plan_model(model, machine), plan_model(one_rank, machine)  # both are refused before anything is started
    facts = inspect_model(model.model)
    if plan.cfg > USUAL_BRANCHES:
        settings = settings.model_copy(update={"cfg_middle": settings.cfg})
    request = {"settings": settings, **_inputs(facts, size_of(chosen), batch=plan.data, branches=plan.cfg)}
    with own_sidecar() as asker:
        reference, result = (asker.sample(each, **request).latent for each in (one_rank, model))
    comparison = Comparison.of(result, reference, tolerance=plan.tolerance)
    measured = {name: value if math.isfinite(value) else None for name, value in asdict(comparison).items()}
    figures = {"ok": comparison.ok, "family": facts.family, "plan": plan.degrees, **measured}
    show(figures, lambda _: f"{plan.reason}\n{comparison}", as_json=chosen.json)
    return 0 if comparison.ok else 1


def _inputs(facts: Any, size: dict[str, int], *, batch: int, branches: int) -> dict[str, Any]:
    """An empty latent, and prompts that are drawn, so that a model without a text encoder can be verified as well: one for
    each of the branches that ranks share, and two at least.
    """
    from .inputs import DRAWN_LENGTHS, MIDDLE_LENGTH, drawn_conditioning, empty_latent  # torch: not before it is needed

    middle = (MIDDLE_LENGTH,) * (branches - USUAL_BRANCHES)
    positive, negative, *between = drawn_conditioning(facts, (*DRAWN_LENGTHS, *middle))
    latent = empty_latent(facts.spec.latent, **size, batch=batch)
    return {"positive": (positive,), "middle": tuple(between), "negative": (negative,), "latent": latent}
