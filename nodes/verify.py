"""Verify: the same few steps on one rank and on the plan, and how far the two are apart."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from .display import NodeDisplay
from .io_types import CATEGORY, Model, searchable
from .parts import convert, session, settings
from .sampler import latent_inputs, negative_prompt, prompt, prompt_sockets

STEPS = 4


class OutriggerVerify(io.ComfyNode):
    """Model, CONDITIONING and LATENT to a sentence with the figures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerVerify",
            display_name="Outrigger Verify",
            category=CATEGORY,
            description=(
                f"Samples {STEPS} steps on one rank, then on the devices and degrees of the model, and shows how far the two "
                f"latents are apart. The model is loaded twice, one after the other."
            ),
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model, with the plan that is to be verified."),
                *prompt_sockets(),
                io.Latent.Input(
                    "latent_image", tooltip="The latent to sample; an empty one of the size you work with."
                ),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="Whether the latents are the same, with the figures.")
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )
        return searchable(schema, "compare", "check parallel", "accuracy", "psnr")

    @classmethod
    def execute(cls, model: Any, positive: Any, latent_image: Any, negative: Any = None) -> io.NodeOutput:
        display = NodeDisplay(cls.hidden.unique_id, stage="sampling")
        model = convert.to_model(model)
        one_rank = model.model_copy(update={"parallel": model.parallel.one_rank})
        widgets = in_our_words(settings.SampleSettings, steps=STEPS)
        inputs = {"positive": prompt(positive, "positive", display), **latent_inputs(latent_image)}
        connected = negative_prompt(one_rank, negative, False, display)
        as_long = {"negative": connected or inputs["positive"], **inputs}  # the empty prompt is not encoded yet
        planned, _ = (session.check(each, widgets, display=display, **as_long) for each in (model, one_rank))
        inputs["negative"] = connected or negative_prompt(one_rank, None, True, display)
        reference, latent = (session.sample(each, widgets, display=display, **inputs) for each in (one_rank, model))
        text = session.compared(latent, reference, planned)
        display.text(text)
        return io.NodeOutput(text, ui={"text": [text]})
