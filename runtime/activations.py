"""How many bytes a rank works with in a step: plain arithmetic on tokens and widths, without torch.

Counted is what a block holds at its widest moment, in a forward pass without gradients, or as it calls a quantised Linear,
with what that makes meanwhile; and the latents and prompts of the request. Not counted is what a kernel takes for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

from .degrees import Degrees
from .families.spec import CLEAN
from .footprint import DTYPE_BYTES, FLOAT32_BYTES
from .inspection import ModelFacts
from .linear_calls import QKV, CalledLinear, bytes_at_call, called_linears
from .lora.size import WorkedOut
from .moments import heads_width, moment_bytes
from .stored import IN_TORCH
from .workload import Call, Prompt, Workload

LATENTS = 4
"""Of sampling in float32: the one that is given, noise, the sampler's own and its input; with a noise mask one more. What the
model takes is joined of the branches, first in float32."""
READ, TAKEN = 1, 1
"""Copies of a prompt: as it is read, and as the model takes it."""
ULYSSES = 6
"""Query, key and value on their way: as they are sent, and as they arrive."""
ARRIVED = 3
"""Of those, while a ring follows."""
RING, LONG_RING = 2, 4
"""Keys and values that come in; and those that go on, where there are more than two ranks."""
MERGED, OUTPUTS = 3, 2
"""Outputs of a ring that are put together, in float32; and those of attention that they are made of, in fewer bits."""


def activation_bytes(
    facts: ModelFacts,
    degrees: Degrees,
    load: Workload,
    *,
    dtype: str,
    on_host: bool = False,
    kernels: str = IN_TORCH,
    changes: WorkedOut = MappingProxyType({}),
) -> int:
    """The most that a rank works with beside the weights; 0 for a family for which that is not known. `on_host`: on the
    processor. `kernels` are those for weights in 4 bits, and `changes` what LoRAs have worked out in each call, by the name
    of a Linear.
    """
    form, size = facts.spec.activations, DTYPE_BYTES[dtype]
    if form is None:
        return 0
    linears = called_linears(facts, degrees.tensor, kernels, changes)
    is_moved = not on_host or size < FLOAT32_BYTES
    calls = [
        _bytes_of(call, facts, degrees, load, size, linears)
        + _prompts(entries, facts, load, is_moved=is_moved) * size
        + _beside(facts, load, call, entries, size)
        for entries in load.shares(degrees.cfg)
        for call in load.calls(entries, fill=facts.spec.text_fill)
    ]
    return max(calls, default=0) + facts.spec.sigma_table * FLOAT32_BYTES


def _bytes_of(
    call: Call,
    facts: ModelFacts,
    degrees: Degrees,
    load: Workload,
    size: int,
    linears: Sequence[CalledLinear],
) -> int:
    """What a rank has in a call of the model, but for what its entries read."""
    form, width = facts.spec.activations, facts.heads * facts.head_dim
    items = -(-load.batch * call.count // degrees.data)
    (tokens, words), (image, text) = _dealt(call, facts, degrees, load)
    block = _block(call, facts, degrees.tensor, image, text, size)
    attention = _attention(facts, degrees, load, image, text, size)
    called = max((bytes_at_call(each, facts, degrees.tensor, items, image, text, size) for each in linears), default=0)
    undealt = form.undealt * (tokens - image) + _is_embedded_whole(facts) * (words - text)
    beside = undealt * size + (form.tables * tokens + form.float32 * image) * FLOAT32_BYTES
    tables = (form.head_tables + items * form.item_tables) * tokens * facts.head_dim * FLOAT32_BYTES
    widest = max(items * max(block, attention), called) + items * beside * width + tables
    return round(widest) + _latents(load, call, items, size)


def _prompts(entries: Sequence[Prompt], facts: ModelFacts, load: Workload, *, is_moved: bool) -> int:
    """Numbers of the prompts of these entries: as they are read, where that makes a copy, and as the model takes them."""
    fill, tokens = facts.spec.text_fill, 0
    for entry in entries:
        is_copied = not entry.again and (is_moved or load.batch > 1 or entry.text < fill)
        tokens += max(entry.text, fill) * (TAKEN + READ * is_copied)
    return load.batch * tokens * facts.config.get(facts.spec.text_width, 0)


def _dealt(call: Call, facts: ModelFacts, degrees: Degrees, load: Workload) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tokens of an item's picture and of its prompt, and how many of either the rank with most of them has."""
    sharing = math.prod(_sharing(facts, degrees, load))
    is_dealt = any("text" in (place.stream, *place.behind) for place in facts.spec.split.split)
    tokens, words = (_filled(count, facts) for count in (load.tokens(facts.spec.patch, call=call), call.text))
    return (tokens, words), (-(-tokens // sharing), -(-words // (sharing if is_dealt else 1)))


def _is_embedded_whole(facts: ModelFacts) -> bool:
    """Whether the prompt is as wide as the model before it is dealt."""
    return any(place.stream == "text" and place.module and place.argument for place in facts.spec.split.split)


def _block(call: Call, facts: ModelFacts, tensor: int, image: int, text: int, size: int) -> float:
    """Bytes that an item has at the widest moment of a block but for attention."""
    form = facts.spec.activations
    inside = form.referred if form.referred and _is_clean(call, facts) else form.mlp
    moments = (inside, form.widened) if size < FLOAT32_BYTES else (inside,)
    block = max(moment_bytes(each, facts, tensor, image, text, size) for each in moments)
    return max(block, moment_bytes(form.of_text, facts, tensor, text, image, size) if form.of_text else 0)


def _filled(tokens: int, facts: ModelFacts) -> int:
    """How many the model makes of so many tokens of a picture or of a prompt."""
    multiple = facts.spec.token_multiple
    return -(-tokens // multiple) * multiple


def _attention(facts: ModelFacts, degrees: Degrees, load: Workload, image: int, text: int, size: int) -> float:
    """Bytes that an item has at attention, that of picture and prompt or that of the picture alone."""
    form = facts.spec.activations
    token = heads_width(facts, degrees.tensor) * _exchange(*_sharing(facts, degrees, load), size)
    tokens = image if form.attention.text == 0 else image + text
    both = moment_bytes(form.attention, facts, degrees.tensor, image, text, size) + tokens * token
    if form.alone is None:
        return both
    return max(both, moment_bytes(form.alone, facts, degrees.tensor, image, text, size) + image * token)


def _is_clean(call: Call, facts: ModelFacts) -> bool:
    """Whether references stand beside the picture as if they had no noise."""
    return bool(call.references) and (call.method or facts.spec.references[0]) == CLEAN


def _latents(load: Workload, call: Call, items: int, size: int) -> int:
    """Bytes of latents in sampling, of so many items that the model takes, and of what other calls have predicted."""
    pixels = (LATENTS + load.masked) * math.prod(load.latent[2:]) + call.others
    taken = items * (FLOAT32_BYTES + size) * math.prod(call.dims)
    return load.latent[1] * (load.batch * pixels * FLOAT32_BYTES + taken)


def _beside(facts: ModelFacts, load: Workload, call: Call, entries: Sequence[Prompt], size: int) -> int:
    """Bytes of what stands beside the latent: as each of these is read, joined for their calls, in what the model takes."""
    read = sum(not entry.again for entry in entries) * math.prod(load.latent[2:])
    joined = sum(math.prod(load.dims_of(entry.area)) for entry in entries)
    taken = call.count * math.prod(call.dims)
    return load.batch * (read + joined + taken) * _channels_beside(facts) * size


def _channels_beside(facts: ModelFacts) -> int:
    """How many channels the model takes beside those of the latent."""
    if not facts.spec.beside:
        return 0
    patch = math.prod(facts.spec.patch) if facts.spec.packed else 1
    return facts.config["in_channels"] // patch - facts.spec.latent.channels


def _sharing(facts: ModelFacts, degrees: Degrees, load: Workload) -> tuple[int, int]:
    """The degrees of ring and Ulysses in attention: an idle cfg axis makes one of them longer, as in `Sequence`."""
    heads, idle = facts.heads // degrees.tensor, degrees.cfg if load.branches == 1 else 1
    if degrees.ring == 1 and heads % (idle * degrees.ulysses) == 0:
        return 1, idle * degrees.ulysses
    return idle * degrees.ring, degrees.ulysses


def _exchange(ring: int, ulysses: int, size: int) -> float:
    """Bytes for a feature of the heads that attention takes, query, key and value among them."""
    merging = 0
    if ring > 1:
        passed, given = LONG_RING if ring > 2 else RING, OUTPUTS if size < FLOAT32_BYTES else 0
        merging = (passed + given) * size + MERGED * FLOAT32_BYTES
    if ulysses == 1:
        return QKV * size + max(merging, size)
    return QKV * size + max(ULYSSES * size, ARRIVED * size + merging)
