"""Text Encode: a prompt to CONDITIONING, with the model's own text encoder."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .display import NodeDisplay
from .io_types import CATEGORY, Model, searchable
from .parts import convert, session


class OutriggerTextEncode(io.ComfyNode):
    """Model and text to CONDITIONING."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerTextEncode",
            display_name="Outrigger Text Encode",
            category=CATEGORY,
            description="Encodes a prompt with the model's own text encoder, in the sidecar.",
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model; its text encoder is used."),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What to draw. An empty text is a good negative prompt.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    display_name="conditioning", tooltip="ComfyUI's CONDITIONING, with one entry, for a sampler."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )
        return searchable(schema, "prompt", "clip text encode", "text encoder")

    @classmethod
    def execute(cls, model: Any, text: str) -> io.NodeOutput:
        display = NodeDisplay(cls.hidden.unique_id, stage="encoding")
        return io.NodeOutput(convert.from_conditioning(session.encode_text(model, text, display)))
