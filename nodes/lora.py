"""LoRA: adds a file to the settings of a model. The sidecar puts it on the loaded model when it samples."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from . import files
from .io_types import CATEGORY, Model, advanced, searchable
from .parts import BOTH_EXPERTS, EXPERTS, MAX_STRENGTH, convert, settings


class OutriggerLora(io.ComfyNode):
    """Model and widgets to `ModelSettings` with one LoRA more."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerLora",
            display_name="Outrigger LoRA",
            category=CATEGORY,
            description=(
                "Changes a model with a LoRA file. Several may follow each other. The model is not loaded again: a file or "
                "strength changed here takes effect with the next sampling."
            ),
            inputs=[
                Model.Input("model", tooltip="From Outrigger Load Model or another Outrigger LoRA."),
                io.Combo.Input(
                    "lora_name",
                    options=files.lora_choices(),
                    tooltip="A .safetensors file of models/loras, made for the model's family.",
                ),
                *_widgets(),
            ],
            outputs=[
                Model.Output(
                    display_name="model", tooltip="The settings with this LoRA, for the Samplers or another LoRA."
                )
            ],
        )
        return searchable(schema, "load lora", "lora loader", "loraloadermodelonly", "lightning", "lightx2v")

    @classmethod
    def validate_inputs(cls, lora_name: str | None = None) -> bool | str:
        """Called when the prompt is queued."""
        try:
            if lora_name is not None:
                files.find_lora(lora_name)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, lora_name: str = "", **others: Any) -> str:
        """Changes when the file behind the name changes."""
        return "" if lora_name == "" else files.stamp({"lora": files.find_lora(lora_name)})

    @classmethod
    def execute(
        cls,
        model: Any,
        lora_name: str,
        strength_model: float = 1.0,
        fuse: bool = False,
        strength_clip: float | None = None,
        expert: str = BOTH_EXPERTS,
    ) -> io.NodeOutput:
        model = convert.to_model(model)
        if _is_zero(strength_model) and (strength_clip is None or _is_zero(strength_clip)):
            return io.NodeOutput(model)
        path = files.find_lora(lora_name)
        widgets = {"strength": strength_model, "strength_clip": strength_clip, "expert": expert, "fuse": fuse}
        widgets["stamp"] = files.stamp({"lora": path})
        lora = in_our_words(settings.LoraSettings, path=path, **widgets)
        if len(model.loras) >= settings.MAX_LORAS:
            raise ValueError(f"model: it has {settings.MAX_LORAS} LoRAs already: take some out")
        return io.NodeOutput(model.model_copy(update={"loras": (*model.loras, lora)}))


def _is_zero(strength: Any) -> bool:
    return isinstance(strength, (int, float)) and strength == 0


def _widgets() -> list[io.Input]:
    """How strongly the file counts, where, and whether it is folded in."""
    return [
        io.Float.Input(
            "strength_model",
            optional=True,
            default=1.0,
            min=-MAX_STRENGTH,
            max=MAX_STRENGTH,
            step=0.01,
            tooltip="How strongly the file counts. Negative takes away what it adds; 0 leaves it out.",
        ),
        advanced(
            io.Boolean.Input(
                "fuse",
                optional=True,
                default=False,
                tooltip=(
                    "Folds the file into the weights, where they are plain: faster steps, but a changed strength "
                    "takes longer. The picture is the same but for rounding."
                ),
            )
        ),
        io.Float.Input(
            "strength_clip",
            optional=True,
            force_input=True,
            tooltip=(
                "Another strength for the text encoder, in Outrigger Text Encode with this model. Unconnected: "
                "strength_model. Few files have such a part."
            ),
        ),
        advanced(
            io.Combo.Input(
                "expert",
                options=[BOTH_EXPERTS, *EXPERTS],
                optional=True,
                default=BOTH_EXPERTS,
                tooltip="Of a model of two experts (Wan 2.2 A14B), the one that the file is for.",
            )
        ),
    ]
