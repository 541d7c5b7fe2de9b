"""Sampler: KSampler's widgets and sockets; the steps run in the sidecar."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from .display import NodeDisplay
from .io_types import CATEGORY, Model, advanced, searchable
from .parts import SAMPLER_NAMES, SCHEDULER_NAMES, convert, session, settings


class OutriggerSampler(io.ComfyNode):
    """Model, CONDITIONING and LATENT to LATENT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerSampler",
            display_name="Outrigger Sampler",
            category=CATEGORY,
            description=(
                "Denoises a latent, on one rank or several. The same seed and settings give the latent that KSampler gives."
            ),
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model."),
                *noise_and_steps("seed"),
                *prompt_sockets(),
                io.Latent.Input(
                    "latent_image", tooltip="The latent to denoise; an empty one for text to image or video."
                ),
                io.Float.Input(
                    "denoise",
                    optional=True,
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of the latent is replaced by noise; lower values keep its structure.",
                ),
                *shift_widgets(),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="The denoised latent, in the VAE's own space.")],
            hidden=[io.Hidden.unique_id],
        )
        return searchable(schema, "ksampler", "denoise", "sample")

    @classmethod
    def validate_inputs(cls, sampler_name: str = SAMPLER_NAMES[0], scheduler: str = SCHEDULER_NAMES[0]) -> bool | str:
        """Called when the prompt is queued. ComfyUI itself sees to the bounds of the numbers."""
        try:
            in_our_words(settings.SampleSettings, sampler_name=sampler_name, scheduler=scheduler)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        latent_image: Any,
        negative: Any = None,
        seed: int = 0,
        steps: int = 20,
        cfg: float = 5.0,
        sampler_name: str = SAMPLER_NAMES[0],
        scheduler: str = SCHEDULER_NAMES[0],
        denoise: float = 1.0,
        shift: float = 0.0,
        max_shift: float = 0.0,
        base_shift: float = 0.5,
    ) -> io.NodeOutput:
        widgets = in_our_words(
            settings.SampleSettings,
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler_name,
            scheduler=scheduler,
            denoise=denoise,
            shift=shift,
            max_shift=max_shift,
            base_shift=base_shift,
        )
        display = NodeDisplay(cls.hidden.unique_id, stage="sampling")
        return io.NodeOutput(sampled(model, widgets, positive, negative, latent_image, display=display))


def sampled(
    model: Any, widgets: Any, positive: Any, negative: Any, latent_image: Any, *, display: NodeDisplay, **given: Any
) -> dict[str, Any]:
    """The LATENT that the sidecar makes of the sockets' values. `given` are further inputs of the request."""
    inputs = {
        "positive": prompt(positive, "positive", display),
        "negative": negative_prompt(model, negative, widgets.needs_negative, display),
        **latent_inputs(latent_image),
        **given,
    }
    return convert.from_latent(session.sample(model, widgets, display=display, **inputs), latent_image)


def latent_inputs(latent_image: Any) -> dict[str, Any]:
    """What a request to sample has of a LATENT."""
    return {
        "latent": convert.to_latent(latent_image, "latent_image"),
        "noise_mask": convert.noise_mask(latent_image, "latent_image"),
        "batch_index": convert.batch_index(latent_image, "latent_image"),
        "downscale": convert.downscale(latent_image),
    }


def prompt(value: Any, what: str, display: NodeDisplay) -> tuple:
    """A CONDITIONING as messages; what it carries without effect is shown on the node."""
    entries = convert.to_conditioning(value, what)
    if line := convert.without_effect(value, what):
        display.tell(line)
    return entries


def prompt_sockets() -> list[io.Input]:
    """What the picture should show, and what not."""
    return [
        io.Conditioning.Input("positive", tooltip="What the picture should show."),
        io.Conditioning.Input(
            "negative",
            optional=True,
            tooltip="What the picture should not show. Without one: the empty prompt, where cfg asks for it.",
        ),
    ]


def noise_and_steps(seed: str) -> list[io.Input]:
    """KSampler's widgets between model and positive, in its order and with its bounds. `seed` is the name of the first."""
    return [
        io.Int.Input(
            seed,
            optional=True,
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Seed of the noise; the noise is ComfyUI's own.",
        ),
        io.Int.Input(
            "steps", optional=True, default=20, min=1, max=10000, tooltip="How many steps the denoising takes."
        ),
        guidance(
            "cfg",
            "Guidance: how closely the picture follows the prompt. 1 leaves the negative prompt out, and is twice as fast.",
        ),
        io.Combo.Input(
            "sampler_name", options=list(SAMPLER_NAMES), optional=True, default=SAMPLER_NAMES[0],
            tooltip="The algorithm of the steps, by KSampler's names.",
        ),
        io.Combo.Input(
            "scheduler", options=list(SCHEDULER_NAMES), optional=True, default=SCHEDULER_NAMES[0],
            tooltip="How the noise level falls over the steps, by KSampler's names.",
        ),
    ]  # fmt: skip


def guidance(name: str, tooltip: str) -> io.Input:
    """A widget for how strongly one prompt is preferred to another, with the bounds of KSampler's cfg."""
    return io.Float.Input(name, optional=True, default=5.0, min=0.0, max=100.0, step=0.1, round=0.01, tooltip=tooltip)


def shift_widgets() -> list[io.Input]:
    """The sigma shift, which ComfyUI sets with ModelSamplingSD3, ModelSamplingAuraFlow or ModelSamplingFlux."""
    return [
        _shift(
            "shift", 0.0, "Sigma shift, as ModelSamplingSD3 and ModelSamplingAuraFlow set it. 0 takes the model's own."
        ),
        _shift(
            "max_shift",
            0.0,
            "Shift for 4096 tokens (1024 x 1024), as ModelSamplingFlux sets it for the size of the latent. 0 leaves it off.",
        ),
        _shift("base_shift", 0.5, "Shift for 256 tokens, where max_shift is set."),
    ]


def _shift(name: str, default: float, tooltip: str) -> io.Input:
    return advanced(
        io.Float.Input(name, optional=True, default=default, min=0.0, max=100.0, step=0.01, tooltip=tooltip)
    )


def negative_prompt(model: Any, negative: Any, needed: bool, display: NodeDisplay) -> tuple:
    """The negative prompt; where there is none (nothing connected, or no embedding) and it is needed, the empty prompt."""
    if negative is not None and not convert.has_no_embedding(negative, "negative"):
        return prompt(negative, "negative", display)
    if not needed:
        return ()
    return (session.encode_text(model, "", display),)
