"""Load Model: names a model and how to run it. Loading happens when the first node that needs the model runs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from . import files, host
from .io_types import CATEGORY, Memory, Model, Parallel, Speed, advanced, searchable
from .parts import DTYPES, FROM_MODEL, QUANT_KINDS, TINY_SHAPES, settings


def _component(name: str, folder: str, tooltip: str) -> io.Input:
    choices = files.component_choices(folder, name)
    return io.Combo.Input(name, options=choices, optional=True, default=FROM_MODEL, tooltip=tooltip)


def _model_inputs() -> list[io.Input]:
    """What the model is, and the format of its numbers."""
    return [
        io.Combo.Input(
            "model",
            options=files.model_choices(),
            tooltip=(
                "A .safetensors or .gguf file of models/diffusion_models or models/checkpoints, a Diffusers "
                "folder of models/diffusers, or tiny-shapes, the small model that comes with Outrigger."
            ),
        ),
        io.Combo.Input(
            "dtype",
            options=list(DTYPES),
            optional=True,
            default=DTYPES[0],
            tooltip="Number format of the weights. auto: bf16 on a GPU that has it, fp32 on the processor.",
        ),
        io.Combo.Input(
            "quant",
            options=list(QUANT_KINDS),
            optional=True,
            default=QUANT_KINDS[0],
            tooltip=(
                "none: as the file stores them. fp8: the blocks' matrices rounded to 8 bits, as fp8_e4m3fn of Load "
                "Diffusion Model. svdquant-int4 or svdquant-nvfp4: 4-bit weights and activations with "
                "a low-rank branch (rank 32), made of a plain file as it is loaded."
            ),
        ),
    ]


def _part_inputs() -> list[io.Input]:
    """Files of its parts."""
    return [
        _component(
            "text_encoder",
            "text_encoders",
            "Text encoder, such as umt5_xxl, t5xxl or qwen_3_4b. from model: the model's own.",
        ),
        advanced(
            _component(
                "text_encoder_2",
                "text_encoders",
                "Second text encoder, of Flux.1 and Stable Diffusion 3, in any order.",
            )
        ),
        _component("vae", "vae", "VAE for Outrigger Decode and Encode. from model: the one in the model's folder."),
    ]


def _settings_inputs() -> list[io.Input]:
    """The sockets for the other nodes of settings."""
    return [
        Parallel.Input(
            "parallel",
            optional=True,
            tooltip="Devices and degrees, from Configure Parallelism. Unconnected: chosen automatically.",
        ),
        Memory.Input(
            "memory",
            optional=True,
            tooltip="Which weights are on the device, from Configure Memory. Unconnected: all of them.",
        ),
        Speed.Input("speed", optional=True, tooltip="Reserved for Configure Speed of a later version."),
    ]


def _later_inputs() -> list[io.Input]:
    """What later versions added: at the end, so that saved graphs keep their values."""
    return [
        io.Combo.Input(
            "model_low_noise",
            options=files.second_model_choices(),
            optional=True,
            default=files.NONE,
            tooltip=(
                "The expert of low noise, for the two files of Wan 2.2 A14B; the one of high noise is the model. A "
                "Diffusers folder has both."
            ),
        ),
        advanced(
            io.Float.Input(
                "boundary",
                optional=True,
                default=0.0,
                min=0.0,
                max=1.0,
                step=0.005,
                round=0.001,
                tooltip="Noise level (sigma) below which the expert of low noise takes over. 0 takes the model's own.",
            )
        ),
        advanced(_component("text_encoder_3", "text_encoders", "Third text encoder, of Stable Diffusion 3.")),
    ]


class OutriggerLoadModel(io.ComfyNode):
    """Widgets and plan to `ModelSettings`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerLoadModel",
            display_name="Outrigger Load Model",
            category=CATEGORY,
            description=(
                "Names a diffusion transformer and how to run it. The output carries these settings, not weights: the "
                "sidecar loads the model when the first node needs it, and keeps it."
            ),
            inputs=[*_model_inputs(), *_part_inputs(), *_settings_inputs(), *_later_inputs()],
            outputs=[
                Model.Output(
                    display_name="model", tooltip="The settings, for Text Encode, Sampler and Decode. No weights."
                )
            ],
        )
        return searchable(
            schema, "load diffusion model", "unet loader", "checkpoint", "diffusers", "wan", "flux", "qwen"
        )

    @classmethod
    def validate_inputs(cls, model: str | None = None) -> bool | str:
        """Called when the prompt is queued. The other values are looked at before anything is loaded."""
        try:
            if model is not None:
                files.find_model(model)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls,
        model: str = TINY_SHAPES,
        text_encoder: str = FROM_MODEL,
        text_encoder_2: str = FROM_MODEL,
        vae: str = FROM_MODEL,
        model_low_noise: str = files.NONE,
        text_encoder_3: str = FROM_MODEL,
        **others: Any,
    ) -> str:
        """Changes when a file behind a name changes."""
        encoders = {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3}
        return files.stamp(files.find_all(model, model_low_noise=model_low_noise, vae=vae, **encoders))

    @classmethod
    def execute(
        cls,
        model: str,
        dtype: str = "auto",
        quant: str = "none",
        text_encoder: str = FROM_MODEL,
        text_encoder_2: str = FROM_MODEL,
        vae: str = FROM_MODEL,
        parallel: Any = None,
        memory: Any = None,
        speed: Any = None,
        model_low_noise: str = files.NONE,
        boundary: float = 0.0,
        text_encoder_3: str = FROM_MODEL,
    ) -> io.NodeOutput:
        if speed is not None:
            raise ValueError("speed: disconnect this input: this version of Outrigger has no speed settings yet")
        encoders = {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3}
        paths = files.find_all(model, model_low_noise=model_low_noise, vae=vae, **encoders)
        sockets = {
            "parallel": (parallel, settings.ParallelSettings, "Outrigger Configure Parallelism"),
            "memory": (memory, settings.MemorySettings, "Outrigger Configure Memory"),
        }
        given = {name: _given(name, *each) for name, each in sockets.items() if each[0] is not None}
        return io.NodeOutput(
            in_our_words(
                settings.ModelSettings,
                **paths,
                dtype=dtype,
                quant=quant,
                boundary=boundary,
                stamp=files.stamp({name: paths[name] for name in ("model", "model_low_noise")}),
                tokenizers=host.tokenizers(),
                **given,
            )
        )


def _given(name: str, value: Any, kind: type, node: str) -> Any:
    """What is connected to a socket of ours. Raises `ValueError` for what another node made."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: connect {node}; this input holds {type(value).__name__}")
    return value
