"""Run one request on one rank and on the plan, and compare the latents; exit status 1 where they differ.

Of a quantised model the latent of the unquantised one too: with `--quant` that is the model itself, and for a file in 4 bits
the one that `--unquantised` names. How far those are apart is what quantising costs, and no mistake.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import Any

from ..comparison import Comparison
from ..errors import Refused
from ..inspection import inspect_model
from ..machine import Machine
from ..needs import USUAL_BRANCHES
from ..plan import plan_model, plan_work
from ..protocol import Sample
from ..settings import ModelSettings
from ..stored import PLAIN
from ..without_spec import check_has_family
from .flags import add_model_flags, add_output_flags, model_settings
from .models import find_model
from .output import show
from .sampler import add_sampling_flags, sample_settings
from .sidecar import own_sidecar
from .sizes import size_of

STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how it is spread, and what is sampled."""
    add_model_flags(parser)
    parser.add_argument(
        "--unquantised",
        metavar="MODEL",
        help="what a quantised file was made of, to be compared with too; with --quant it is MODEL itself",
    )
    add_sampling_flags(parser, steps=STEPS)
    add_output_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Print how far the plan is from one rank."""
    model, settings = model_settings(chosen), sample_settings(chosen)
    one_rank = model.model_copy(update={"parallel": model.parallel.one_rank})
    machine = Machine.here()
    plan = plan_model(model, machine)
    check_has_family(model.model, "there is no plan to compare with one rank")
    plain = _unquantised(one_rank, chosen.unquantised)
    facts = inspect_model(model.model)
    if plan.cfg > USUAL_BRANCHES:
        settings = settings.model_copy(update={"cfg_middle": settings.cfg})
    request = {"settings": settings, **_inputs(facts, size_of(chosen), batch=plan.data, branches=plan.cfg)}
    works = (Sample(job="plan", model=each, **request) for each in (one_rank, model))
    _, plan = (plan_work(each, machine) for each in works)  # both are refused before anything is started
    with own_sidecar() as asker:
        reference, result, *exact = (
            asker.sample(each, **request).latent for each in (one_rank, model, *filter(None, [plain]))
        )
    comparison = Comparison.of(result, reference, tolerance=plan.tolerance)
    cost = Comparison.of(result, exact[0], tolerance=math.inf) if exact else None
    figures = {"ok": comparison.ok, "family": facts.family, "plan": plan.degrees, **_measured(comparison)}
    figures["unquantised"] = cost and {"model": plain.model, **_measured(cost)}
    text = "\n".join(filter(None, (plan.reason, str(comparison), cost and _described(cost))))
    show(figures, lambda _: text, as_json=chosen.json)
    return 0 if comparison.ok else 1


def _unquantised(one_rank: ModelSettings, named: str | None) -> ModelSettings | None:
    """The model to be compared with beside the quantised one, on one rank. Raises `Refused` for one that cannot be used."""
    if named is None and one_rank.quant == PLAIN:
        return None
    model = one_rank.model if named is None else find_model(named)
    plain = one_rank.model_copy(update={"model": model, "quant": PLAIN})
    if inspect_model(plain.model).family != inspect_model(one_rank.model).family:
        raise Refused(f"{model} is no model that {one_rank.model} was made of: it is of another family")
    return plain


def _measured(comparison: Comparison) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(comparison).items()}


def _described(cost: Comparison) -> str:
    return (
        f"against the unquantised model: relative error {cost.rel_err:.2g}, largest difference {cost.max_abs:.2g}, "
        f"PSNR {cost.psnr_db:.1f} dB"
    )


def _inputs(facts: Any, size: dict[str, int], *, batch: int, branches: int) -> dict[str, Any]:
    """An empty latent, and prompts that are drawn, so that a model without a text encoder can be verified as well: one for
    each of the branches that ranks share, and two at least.
    """
    from .inputs import DRAWN_LENGTHS, MIDDLE_LENGTH, drawn_conditioning, empty_latent  # torch: not before it is needed

    middle = (MIDDLE_LENGTH,) * (branches - USUAL_BRANCHES)
    positive, negative, *between = drawn_conditioning(facts, (*DRAWN_LENGTHS, *middle))
    latent = empty_latent(facts.spec.latent, **size, batch=batch)
    return {"positive": (positive,), "middle": tuple(between), "negative": (negative,), "latent": latent}
