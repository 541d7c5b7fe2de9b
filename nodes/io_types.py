"""Our own socket types, and what the newest ComfyUI knows about a node and the oldest does not."""

from __future__ import annotations

from comfy_api.latest import io

CATEGORY = "Outrigger"

Model = io.Custom("OUTRIGGER_MODEL")
Parallel = io.Custom("OUTRIGGER_PARALLEL")
Memory = io.Custom("OUTRIGGER_MEMORY")
Speed = io.Custom("OUTRIGGER_SPEED")


def searchable(schema: io.Schema, *aliases: str) -> io.Schema:
    """The schema with other names that the node is found under, where ComfyUI (0.11) has them."""
    if hasattr(schema, "search_aliases"):
        schema.search_aliases = list(aliases)
    return schema


def advanced(widget: io.Input) -> io.Input:
    """The input, folded away with the rare ones where ComfyUI (0.10) can do that."""
    if hasattr(widget, "advanced"):
        widget.advanced = True
    return widget
