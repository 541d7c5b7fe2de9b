"""Say how a model would be spread over this machine, or why it cannot be and what can. Reads no weight."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import Refused
from ..experts import inspect_settings
from ..facts import ModelFacts
from ..kernels import kernels_here
from ..lora.fitting import check_loras
from ..machine import Machine
from ..needs import USUAL_BRANCHES
from ..plan import plan_facts, plan_model
from ..settings import ModelSettings
from ..stored import FOUR_BIT
from ..units import in_units
from ..without_spec import pipeline_without_spec
from ..workload import Workload
from .flags import add_model_flags, add_output_flags, model_settings
from .output import refused, show
from .sizes import add_size_flags, latent_shape, size_of

REFUSED = ("plan", "bytes_per_rank", "nearest", "nearest_devices", "nearest_offload", "nearest_latent")
"""What there is nothing to print of where there is no plan, but for what the refusal names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how it is to be spread, and what a step is of."""
    add_model_flags(parser)
    add_size_flags(parser)
    parser.add_argument("--batch", type=int, default=0, help="pictures or videos at once; 0 for one for each replica")
    add_output_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Print the plan; exit status 1 where there is none."""
    answer = _answer(chosen)
    show(answer, described, as_json=chosen.json)
    return 0 if answer["ok"] else 1


def described(answer: dict[str, Any]) -> str:
    """The answer for a reader."""
    if not answer["ok"]:
        return f"No plan: {answer['reason']}"
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in answer["plan"].items())
    weights, work, peak = (answer[name] for name in ("bytes_per_rank", "activation_bytes", "peak_bytes"))
    of_a_step = f" (latent {answer['latent']}): {in_units(work)}; both: {in_units(peak)}" if work else ": not known"
    host = f"{in_units(answer['host_bytes'])} of host memory in all" if answer["host_bytes"] else ""
    lines = [
        degrees,
        f"devices: {', '.join(answer['devices'])}",
        f"weights on each rank: {in_units(weights) if weights else 'not known'}",
        f"what a step works with beside them{of_a_step}",
        f"{host}, of which {in_units(answer['host_free'])} are free" if host and answer["host_free"] else host,
        answer["reason"],
        answer["kernels"],
    ]
    return "\n".join(filter(None, lines))


def _answer(chosen: argparse.Namespace) -> dict[str, Any]:
    """What `--json` prints."""
    try:
        model, machine = model_settings(chosen), Machine.here()
        facts = None if pipeline_without_spec(model.model) else inspect_settings(model)
        workload = facts and _workload(chosen, model, facts)
        if facts:
            check_loras(model.loras, facts)
        plan = plan_facts(facts, model, machine, workload=workload) if facts else plan_model(model, machine)
    except Refused as refusal:
        nothing = dict.fromkeys(REFUSED)
        return nothing | refused(str(refusal), refusal)
    return {
        "ok": True,
        "plan": plan.degrees,
        "devices": plan.devices,
        "bytes_per_rank": plan.bytes_per_rank,
        "activation_bytes": plan.activation_bytes,
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "host_free": machine.host.free,
        "latent": "x".join(map(str, workload.latent)) if workload else "of any size",
        "reason": plan.reason,
        "kernels": _kernels(facts, model.dtype, plan.devices[0]) if facts else "",
        "nearest": None,
    }


def _kernels(facts: ModelFacts, dtype: str, device: str) -> str:
    """What multiplies with the 4-bit weights of a model; empty where it has none."""
    kinds = {kind for each in facts.experts for stored in each.stored.values() for kind in stored.kinds}
    if kinds.isdisjoint(FOUR_BIT):
        return ""
    if dtype == "auto":
        dtype = {"cpu": "fp32"}.get(device, "bf16")
    return str(kernels_here(kinds, dtype=dtype, device=device))


def _workload(chosen: argparse.Namespace, model: ModelSettings, facts: ModelFacts) -> Workload:
    """A guided step of the size that is asked for, with as many items and prompts as the degrees share out."""
    family = facts.spec
    batch, branches = chosen.batch or max(1, model.parallel.data), max(USUAL_BRANCHES, model.parallel.cfg)
    return Workload(
        latent=latent_shape(family.latent, **size_of(chosen), batch=batch),
        text=family.text_length,
        branches=branches,
    )
