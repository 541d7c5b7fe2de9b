"""What a model will take of a rank's memory, before a weight is read."""

from __future__ import annotations

from .facts import ModelFacts
from .footprint import Held, held_by_rank
from .mesh import Mesh
from .settings import AUTO, ModelSettings
from .weighing import Bytes

AUTO_DTYPE = {"cpu": "fp32", "cuda": "bf16"}


def bytes_needed(facts: ModelFacts, settings: ModelSettings, mesh: Mesh) -> Bytes:
    """What the weights of a model's transformers take, at least: resident blocks that are left to the free memory are not
    counted.
    """
    dtype = AUTO_DTYPE[mesh.device.type] if settings.dtype == AUTO else settings.dtype
    held = {"dtype": dtype, "tensor": mesh.degree("tensor"), "offload": settings.memory}
    each = sum((held_by_rank(facts, **held) for facts in facts.experts), Held())
    return Bytes(host=each.on_host) if mesh.device.type == "cpu" else Bytes(each.on_gpu, host=each.streamed)
