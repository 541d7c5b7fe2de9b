"""Configure Memory: which weights are on the device while they do not run, and where text encoder and VAE are."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from .io_types import CATEGORY, Memory, searchable
from .parts import COMPONENT_PLACES, FETCH_KINDS, OFFLOAD_KINDS, settings


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
                _place(
                    "text_encoder_device",
                    "text encoder",
                    "it waits in host memory and comes to the device for each prompt",
                ),
                _place("vae_device", "VAE", "it is on the device once it has been used"),
                io.Combo.Input(
                    "fetch",
                    options=list(FETCH_KINDS),
                    optional=True,
                    default=FETCH_KINDS[0],
                    tooltip=(
                        "How GPUs that share one picture (ulysses, ring) get a block. own: each copies all of it. gather: each "
                        "copies a part, and they put it together. auto: what is faster, measured once."
                    ),
                ),
            ],
            outputs=[Memory.Output(display_name="memory", tooltip="Where the weights are kept, for Load Model.")],
        )
        return searchable(schema, "offload", "low vram", "block swap", "layerwise")

    @classmethod
    def validate_inputs(
        cls,
        offload: str = "none",
        resident_blocks: str = "auto",
        prefetch: str = "1",
        text_encoder_device: str = "auto",
        vae_device: str = "auto",
        fetch: str = "auto",
    ) -> bool:
        """Called when the prompt is queued, with what is not linked. True, or raises `ValueError`."""
        cls.execute(offload, resident_blocks, prefetch, text_encoder_device, vae_device, fetch)
        return True

    @classmethod
    def execute(
        cls,
        offload: str = "none",
        resident_blocks: str = "auto",
        prefetch: str = "1",
        text_encoder_device: str = "auto",
        vae_device: str = "auto",
        fetch: str = "auto",
    ) -> io.NodeOutput:
        memory = in_our_words(
            settings.MemorySettings,
            offload=offload,
            resident_blocks=resident_blocks,
            prefetch=prefetch,
            text_encoder_device=text_encoder_device,
            vae_device=vae_device,
            fetch=fetch,
        )
        return io.NodeOutput(memory)


def _place(name: str, part: str, auto: str) -> io.Input:
    """A widget for where a part of the model is."""
    return io.Combo.Input(
        name,
        options=list(COMPONENT_PLACES),
        optional=True,
        default=COMPONENT_PLACES[0],
        tooltip=(
            f"Where the {part} is. auto: {auto}. device: there all the time. cpu: it runs on the processor. on-demand: read "
            f"for each use, and let go of after it."
        ),
    )
