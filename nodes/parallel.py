"""Configure Parallelism: which devices, and how much of each kind of parallelism."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime.errors import in_our_words
from .io_types import CATEGORY, Parallel, searchable
from .parts import MAX_DEGREE, settings


def _degree(axis: str, tooltip: str) -> io.Input:
    return io.Int.Input(axis, optional=True, default=0, min=0, max=MAX_DEGREE, tooltip=f"{tooltip} 0 = automatic.")


class OutriggerParallelism(io.ComfyNode):
    """Widgets to `ParallelSettings`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = io.Schema(
            node_id="OutriggerParallelism",
            display_name="Outrigger Configure Parallelism",
            category=CATEGORY,
            description=(
                "Which devices run the model, and how the work is shared among them. The degrees multiply to the number "
                "of devices; a degree of 0 is chosen for you."
            ),
            inputs=[
                io.String.Input(
                    "devices",
                    optional=True,
                    default="auto",
                    tooltip=(
                        "auto: all GPUs, or the processor where there is none. cuda:0,1: one rank on each GPU listed. "
                        "cpu:2: that many ranks on the processor."
                    ),
                ),
                _degree(
                    "ulysses",
                    "Sequence parallel: each rank computes some attention heads. At most as many ranks as heads.",
                ),
                _degree("ring", "Sequence parallel: keys and values go round the ranks. Any number of ranks."),
                _degree(
                    "tensor", "Each rank holds a part of every layer: for a model that does not fit on one device."
                ),
                _degree(
                    "cfg",
                    "2: positive and negative prompt are computed at the same time, one half of the ranks each. 3: with a "
                    "middle or an empty prompt, one third each.",
                ),
                _degree("data", "Each rank computes some items of the batch. Of use with a batch only."),
            ],
            outputs=[Parallel.Output(display_name="parallel", tooltip="The plan, for Load Model.")],
        )
        return searchable(schema, "multi gpu", "ulysses", "sequence parallel", "cfg parallel")

    @classmethod
    def validate_inputs(
        cls,
        devices: str = "auto",
        ulysses: int = 0,
        ring: int = 0,
        tensor: int = 0,
        cfg: int = 0,
        data: int = 0,
    ) -> bool:
        """Called when the prompt is queued, with what is not linked. True, or raises `ValueError`.

        A text returned from here would be shown six times, once for each argument; one that is raised is shown once.
        """
        cls._settings(devices=devices, ulysses=ulysses, ring=ring, tensor=tensor, cfg=cfg, data=data)
        return True

    @classmethod
    def execute(
        cls,
        devices: str = "auto",
        ulysses: int = 0,
        ring: int = 0,
        tensor: int = 0,
        cfg: int = 0,
        data: int = 0,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            cls._settings(devices=devices, ulysses=ulysses, ring=ring, tensor=tensor, cfg=cfg, data=data)
        )

    @classmethod
    def _settings(cls, **widgets: object) -> object:
        return in_our_words(settings.ParallelSettings, **widgets)
