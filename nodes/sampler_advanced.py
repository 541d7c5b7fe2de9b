"""Sampler (Advanced): KSamplerAdvanced's widgets and sockets, and SIGMAS and NOISE of other nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime.errors import in_our_words, shown
from .display import NodeDisplay
from .io_types import CATEGORY, Model, searchable
from .parts import SAMPLER_NAMES, SCHEDULER_NAMES, convert, settings
from .sampler import guidance, noise_and_steps, prompt, prompt_sockets, sampled, shift_widgets

SWITCH = {"enable": True, "disable": False}
LAST_STEP = 10000


class OutriggerSamplerAdvanced(io.ComfyNode):
    """Model, CONDITIONING and LATENT to LATENT, over a part of the steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerSamplerAdvanced",
            display_name="Outrigger Sampler (Advanced)",
            category=CATEGORY,
            description=(
                "Runs a part of the steps, with or without noise at the start and the end, or along the SIGMAS of another "
                "node. The same seed and settings give the latent that KSampler (Advanced) gives."
            ),
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model."),
                _switch(
                    "add_noise", "enable", "disable starts from the latent as it is, with the noise left over in it."
                ),
                *noise_and_steps("noise_seed"),
                *prompt_sockets(),
                io.Latent.Input("latent_image", tooltip="The latent to denoise, or one with noise left over."),
                _step("start_at_step", 0, "The first step to run. Those before it are left out."),
                _step("end_at_step", LAST_STEP, "Where to stop. A number over steps runs them to the end."),
                _switch(
                    "return_with_leftover_noise",
                    "disable",
                    "enable keeps the noise of the step it stops at, for the next sampler; disable removes it.",
                ),
                io.Sigmas.Input(
                    "sigmas",
                    optional=True,
                    tooltip="Noise levels of a scheduler node, in place of steps and scheduler.",
                ),
                io.Noise.Input(
                    "noise", optional=True, tooltip="Noise of a noise node, in place of add_noise and noise_seed."
                ),
                *shift_widgets(),
                *_third_prompts(),
            ],
            outputs=[
                io.Latent.Output(
                    display_name="latent",
                    tooltip="The latent, in the VAE's own space; with noise left over where asked.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )
        return searchable(
            schema, "ksampler advanced", "samplercustom", "sigmas", "leftover noise", "refiner", "dual cfg", "perp-neg"
        )

    @classmethod
    def validate_inputs(
        cls,
        sampler_name: str = SAMPLER_NAMES[0],
        scheduler: str = SCHEDULER_NAMES[0],
        add_noise: str = "enable",
        return_with_leftover_noise: str = "disable",
    ) -> bool | str:
        """Called when the prompt is queued. ComfyUI itself sees to the bounds of the numbers."""
        try:
            in_our_words(settings.SampleSettings, sampler_name=sampler_name, scheduler=scheduler)
            _is_on("add_noise", add_noise)
            _is_on("return_with_leftover_noise", return_with_leftover_noise)
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
        add_noise: str = "enable",
        noise_seed: int = 0,
        steps: int = 20,
        cfg: float = 5.0,
        sampler_name: str = SAMPLER_NAMES[0],
        scheduler: str = SCHEDULER_NAMES[0],
        start_at_step: int = 0,
        end_at_step: int = LAST_STEP,
        return_with_leftover_noise: str = "disable",
        sigmas: Any = None,
        noise: Any = None,
        shift: float = 0.0,
        max_shift: float = 0.0,
        base_shift: float = 0.5,
        middle: Any = None,
        cfg_middle: float = 5.0,
        empty_conditioning: Any = None,
        neg_scale: float = 1.0,
    ) -> io.NodeOutput:
        widgets = in_our_words(
            settings.SampleSettings,
            seed=getattr(noise, "seed", noise_seed),
            steps=steps,
            cfg=cfg,
            sampler_name=sampler_name,
            scheduler=scheduler,
            add_noise=_is_on("add_noise", add_noise),
            start_at_step=start_at_step,
            end_at_step=end_at_step,
            leftover_noise=_is_on("return_with_leftover_noise", return_with_leftover_noise),
            shift=shift,
            max_shift=max_shift,
            base_shift=base_shift,
            cfg_middle=None if middle is None else cfg_middle,
            neg_scale=None if empty_conditioning is None else neg_scale,
        )
        convert.to_latent(latent_image, "latent_image")
        display = NodeDisplay(cls.hidden.unique_id, stage="sampling")
        given = {
            "sigmas": convert.to_sigmas(sigmas, "sigmas"),
            "noise": convert.to_noise(noise, latent_image, "noise"),
            "middle": _between(middle, empty_conditioning, display),
        }
        return io.NodeOutput(sampled(model, widgets, positive, negative, latent_image, display=display, **given))


def _between(middle: Any, empty_conditioning: Any, display: NodeDisplay) -> tuple:
    """The prompt between positive and negative; none where nothing is connected."""
    for name, value in (("middle", middle), ("empty_conditioning", empty_conditioning)):
        if value is not None:
            return prompt(value, name, display)
    return ()


def _third_prompts() -> list[io.Input]:
    """What DualCFGGuider and PerpNegGuider take beside positive and negative."""
    return [
        io.Conditioning.Input(
            "middle",
            optional=True,
            tooltip=(
                "A prompt between positive and negative, as cond2 of DualCFGGuider: cfg is how far positive is moved "
                "away from it."
            ),
        ),
        guidance("cfg_middle", "How far middle is moved away from negative. Without a middle prompt it does nothing."),
        io.Conditioning.Input(
            "empty_conditioning",
            optional=True,
            tooltip=(
                "The empty prompt, as in PerpNegGuider: of negative only what has nothing to do with positive is "
                "then taken away."
            ),
        ),
        io.Float.Input(
            "neg_scale",
            optional=True,
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.01,
            tooltip="How much of negative is taken away, as in PerpNegGuider. Without an empty_conditioning it does nothing.",
        ),
    ]


def _switch(name: str, default: str, tooltip: str) -> io.Input:
    return io.Combo.Input(name, options=list(SWITCH), optional=True, default=default, tooltip=tooltip)


def _step(name: str, default: int, tooltip: str) -> io.Input:
    return io.Int.Input(name, optional=True, default=default, min=0, max=LAST_STEP, tooltip=tooltip)


def _is_on(name: str, value: str) -> bool:
    if not isinstance(value, str) or value not in SWITCH:
        raise ValueError(f"{name} {shown(value)} is not available in Outrigger; choose one of: {', '.join(SWITCH)}")
    return SWITCH[value]
