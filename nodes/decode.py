"""Decode: a LATENT to pictures, with the model's own VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .display import NodeDisplay
from .io_types import CATEGORY, Model, searchable
from .parts import convert, session


class OutriggerDecode(io.ComfyNode):
    """Model and LATENT to IMAGE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerDecode",
            display_name="Outrigger Decode",
            category=CATEGORY,
            description="Decodes a latent with the model's own VAE, in the sidecar. The frames of a video come as a batch.",
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model; its VAE is used."),
                io.Latent.Input("samples", tooltip="The latent to decode: pictures or video of this model's VAE."),
            ],
            outputs=[
                io.Image.Output(display_name="images", tooltip="ComfyUI's IMAGE: pictures, or the frames of a video.")
            ],
            hidden=[io.Hidden.unique_id],
        )
        return searchable(schema, "vae decode", "latent to image")

    @classmethod
    def execute(cls, model: Any, samples: Any) -> io.NodeOutput:
        display = NodeDisplay(cls.hidden.unique_id, stage="decoding")
        images = session.decode(model, convert.to_latent(samples, "samples"), display)
        return io.NodeOutput(convert.from_images(images))
