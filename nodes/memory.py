"""Configure Memory: which weights are on the device while they do not run."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from .io_types import CATEGORY, Memory, searchable
from .parts import OFFLOAD_KINDS, settings


class OutriggerMemory(io.ComfyNode):
    """Widgets to `MemorySettings`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerMemory",
            display_name="Outrigger Configure Memory",
            category=CATEGORY,
            description=(
                "For a model that does not fit: the weights of its blocks come to the device one after another, the next "
                "ones on their way while one runs. The picture stays the same."
            ),
            inputs=[
                io.Combo.Input(
                    "offload",
                    options=list(OFFLOAD_KINDS),
                    optional=True,
                    default=OFFLOAD_KINDS[0],
                    tooltip=(
                        "none: all weights are on the device. layerwise: those of the blocks are in host memory. disk: they "
                        "are read from their file in each step, for when host memory is short too."
                    ),
                ),
                io.String.Input(
                    "resident_blocks",
                    optional=True,
                    default="auto",
                    tooltip=(
                        "Blocks that stay on the device all the same: a count such as 2, a part such as 0.25, or auto for as "
                        "many as the free memory holds."
                    ),
                ),
                io.String.Input(
                    "prefetch",
                    optional=True,
                    default="1",
                    tooltip="Blocks on their way while one runs: a count such as 2, or a part such as 0.25. Each takes memory.",
                ),
            ],
            outputs=[Memory.Output(display_name="memory", tooltip="Where the weights are kept, for Load Model.")],
        )
        return searchable(schema, "offload", "low vram", "block swap", "layerwise")

    @classmethod
    def validate_inputs(cls, offload: str = "none", resident_blocks: str = "auto", prefetch: str = "1") -> bool:
        """Called when the prompt is queued, with what is not linked. True, or raises `ValueError`."""
        cls._settings(offload=offload, resident_blocks=resident_blocks, prefetch=prefetch)
        return True

    @classmethod
    def execute(cls, offload: str = "none", resident_blocks: str = "auto", prefetch: str = "1") -> io.NodeOutput:
        return io.NodeOutput(cls._settings(offload=offload, resident_blocks=resident_blocks, prefetch=prefetch))

    @classmethod
    def _settings(cls, **widgets: object) -> object:
        return in_our_words(settings.MemorySettings, **widgets)
