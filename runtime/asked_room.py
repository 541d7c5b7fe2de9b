"""The room that ComfyUI is asked for before a job: what the job is still to load. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from .chosen_part import VAE, ChosenPart, PartKind
from .experts import inspect_settings
from .part_sizes import text_bytes, vae_bytes
from .parts import text_parts_of, vae_of
from .plan import Plan
from .reports import HeldModel
from .settings import ModelSettings
from .without_spec import pipeline_without_spec

TEXT_ITEM_BYTES = 2
"""On a GPU text encoders are held in bfloat16."""


def room_for(
    model: ModelSettings, kind: PartKind | None, *, loaded: Sequence[HeldModel], find_plan: Callable[[], Plan]
) -> dict[str, int]:
    """What a job will take of each device beside what is loaded, at least: its model's transformer, and the part that it needs
    where that runs on a GPU. A plan is asked for where there is something to load.
    """
    held = next((each for each in reversed(loaded) if each.model.weights == model.weights), None)
    part = ChosenPart.of(kind, model) if kind else None
    comes = part is not None and part.place != "cpu" and (held is None or part not in held.parts)
    room: Counter[str] = Counter()
    if held is None or comes:
        with suppress(ValueError, OSError):  # the job itself will say what is wrong
            plan = find_plan()
            if held is None:
                room.update(dict.fromkeys(plan.devices, plan.bytes_per_rank))
            if comes:
                room.update(_on_gpus(kind, model, plan))
    return dict(room)


def _on_gpus(kind: PartKind, model: ModelSettings, plan: Plan) -> dict[str, int]:
    """What a part takes of each GPU of a plan. A pipeline of diffusers' own counts its parts with its weights."""
    if "cpu" in plan.devices or pipeline_without_spec(model.model):
        return {}
    facts = inspect_settings(model)
    if kind == VAE:
        return dict.fromkeys(plan.devices, vae_bytes(vae_of(model, facts)))
    size = text_bytes(text_parts_of(model, facts), TEXT_ITEM_BYTES) // plan.tensor
    return dict.fromkeys(plan.devices[: plan.tensor], size)  # the first ranks along the innermost axis encode
