"""The plan of a command's model on this machine, found without torch."""

from __future__ import annotations

from ..inspection import inspect_model
from ..machine import Machine
from ..plan import Plan, make_plan
from ..settings import ModelSettings


def plan_for(model: ModelSettings) -> Plan:
    """The legal plan. Raises `PlanRefused` with the nearest one, `Refused` for a model that cannot be used."""
    facts = inspect_model(model.model, quant=model.quant)
    return make_plan(model.parallel, facts, Machine.here(), dtype=model.dtype, offload=model.memory)
