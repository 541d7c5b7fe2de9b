"""What a model will take of a rank's memory, before a weight is read."""

from __future__ import annotations

from .facts import ModelFacts
from .footprint import ON_DEVICE, bytes_per_rank
from .mesh import Mesh
from .settings import AUTO, ModelSettings
from .weighing import Bytes

AUTO_DTYPE = {"cpu": "fp32", "cuda": "bf16"}


def bytes_needed(facts: ModelFacts, settings: ModelSettings, mesh: Mesh) -> Bytes:
    """What the weights of a model's transformers take, at least: resident blocks that are left to the free memory are not
    counted.
    """
    dtype = AUTO_DTYPE[mesh.device.type] if settings.dtype == AUTO else settings.dtype
    cut = {"dtype": dtype, "tensor": mesh.degree("tensor")}
    on_device = sum(bytes_per_rank(each, **cut, offload=settings.memory) for each in facts.experts)
    whole = sum(bytes_per_rank(each, **cut, offload=ON_DEVICE) for each in facts.experts)
    return Bytes.on(mesh.device, on_device) + Bytes(host=whole if settings.memory.offload == "layerwise" else 0)
