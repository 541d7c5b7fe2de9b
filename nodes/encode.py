"""Encode: pictures to a LATENT, with the model's own VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .display import NodeDisplay
from .io_types import CATEGORY, Model, searchable
from .parts import convert, session


class OutriggerEncode(io.ComfyNode):
    """Model and IMAGE to LATENT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerEncode",
            display_name="Outrigger Encode",
            category=CATEGORY,
            description="Encodes pictures with the model's own VAE, in the sidecar. A batch is the frames of a video for a "
            "video model.",
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model; its VAE is used."),
                io.Image.Input("pixels", tooltip="The picture to encode, or the frames of a video as a batch."),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="ComfyUI's LATENT, for a sampler with denoise below 1.")
            ],
            hidden=[io.Hidden.unique_id],
        )
        return searchable(schema, "vae encode", "image to latent", "img2img")

    @classmethod
    def execute(cls, model: Any, pixels: Any) -> io.NodeOutput:
        display = NodeDisplay(cls.hidden.unique_id, stage="encoding")
        latent = session.encode(model, convert.to_pixels(pixels, "pixels"), display)
        return io.NodeOutput(convert.from_latent(latent, {}))
