"""What a step works with as it calls a Linear that is not held as it is multiplied with: plain arithmetic, without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from .families.cuts import Activations, Moment
from .footprint import local_shape, shard_mode
from .inspection import ModelFacts
from .lora.size import Added, WorkedOut
from .moments import moment_bytes
from .stored import Stored
from .temporaries import call_bytes, changed_call_bytes

TOKENS = Moment(1)
"""As wide as the model, before a block."""
GELU = 2
"""Inside an MLP: what it is of, and what it gives. More are in one with a gate, which is made beside what it is for."""
QKV, KEYS = 3, 1
"""Query, key and value; and what there is of them as the values of a prompt are made."""


class CalledLinear(NamedTuple):
    """One that is not held as it is multiplied with: its shape on a rank, where in the model it is called, and what changes it."""

    stored: Stored
    shape: tuple[float, float]
    place: Literal["first", "last", "attention", "once"]
    changes: Sequence[Added] = ()


def called_linears(facts: ModelFacts, tensor: int, kernels: str, changes: WorkedOut) -> list[CalledLinear]:
    """Those that differ: most blocks of one list have the same ones, but for what changes them."""
    held = {name: facts.stored.get(name, Stored()) for name in (*facts.stored, *changes)}
    alike = {
        (
            re.sub(r"\.\d+\.", ".0.", name, count=1),
            facts.shapes[f"{name}.weight"],
            stored.kind,
            len(changes.get(name, ())),
        ): name
        for name, stored in held.items()
        if f"{name}.weight" in facts.shapes
    }
    return [
        _linear(facts, name, held[name], tensor, kernels)._replace(changes=changes.get(name, ()))
        for name in alike.values()
    ]


def _linear(facts: ModelFacts, name: str, stored: Stored, tensor: int, kernels: str) -> CalledLinear:
    out, into = facts.shapes[f"{name}.weight"]
    stored = replace(stored, kernels=kernels, joined=tuple(replace(part, kernels=kernels) for part in stored.joined))
    width, once = facts.heads * facts.head_dim, shard_mode(facts, name) == "gather" or not facts.spec.block_of(name)
    place = "once" if once else "last" if into > width else "first" if out > width else "attention"
    return CalledLinear(stored, local_shape(facts, name, tensor), place)


def bytes_at_call(
    linear: CalledLinear, facts: ModelFacts, tensor: int, items: int, image: int, text: int, size: int
) -> float:
    """Bytes that a rank has in the call of a Linear, of so many tokens of each item: what its block holds, and what it makes.

    What is called once for an item, to modulate its tokens, is called where there is nothing but those.
    """
    form = facts.spec.activations
    tokens = image + (text if form.mlp.text is None else 0)
    if linear.place == "once":
        tokens, moment = 1, TOKENS
    elif linear.place == "attention":
        attention = form.alone or form.attention
        moment = replace(attention, cut=attention.cut + QKV - 1)
    elif linear.place == "last":
        moment = form.last or replace(form.mlp, hidden=form.mlp.hidden - 1)
    else:
        moment = form.first or replace(form.mlp, hidden=form.mlp.hidden > GELU)
    held = items * moment_bytes(moment, facts, tensor, image, text, size) + _call(linear, items * tokens, size)
    if (moment := _moment_of_text(linear, form)) is None:
        return held
    return max(held, items * moment_bytes(moment, facts, tensor, text, image, size) + _call(linear, items * text, size))


def _moment_of_text(linear: CalledLinear, form: Activations) -> Moment | None:
    """What a block holds as this Linear is called for a long prompt, its input among that and its output not; None where it
    is not one of those at the widest moment of such a prompt.
    """
    if form.of_text is None:
        return None
    if form.of_text.hidden:
        inside = {"first": 0, "last": form.of_text.hidden - 1}
        return replace(form.of_text, hidden=inside[linear.place]) if linear.place in inside else None
    is_column = linear.place == "attention" and linear.shape[0] <= linear.shape[1]
    return replace(form.of_text, cut=KEYS) if is_column else None


def _call(linear: CalledLinear, tokens: int, size: int) -> float:
    """Bytes that a Linear makes in a call of so many tokens."""
    call = linear.stored, linear.shape, tokens, size
    return max(call_bytes(*call), _changed(*call, changes=linear.changes))


def _changed(*call: Any, changes: Sequence[Added]) -> float:
    """Bytes of a call whose weight is changed by these; 0 where there are none."""
    if not changes:
        return 0
    whole, made = (max(getattr(each, size) for each in changes) for size in ("whole", "made"))
    return changed_call_bytes(*call, changes=len(changes), whole=whole, made=made)
