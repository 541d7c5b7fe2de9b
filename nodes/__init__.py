"""What lives in ComfyUI: nodes that describe what is wanted, and hand it to the sidecar."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .conditioning import OutriggerTextEncode
from .decode import OutriggerDecode
from .encode import OutriggerEncode
from .lora import OutriggerLora
from .memory import OutriggerMemory
from .model import OutriggerLoadModel
from .parallel import OutriggerParallelism
from .sampler import OutriggerSampler
from .sampler_advanced import OutriggerSamplerAdvanced
from .verify import OutriggerVerify

NODES: tuple[type[io.ComfyNode], ...] = (
    OutriggerLoadModel,
    OutriggerLora,
    OutriggerParallelism,
    OutriggerMemory,
    OutriggerTextEncode,
    OutriggerSampler,
    OutriggerSamplerAdvanced,
    OutriggerDecode,
    OutriggerEncode,
    OutriggerVerify,
)


class Outrigger(ComfyExtension):
    """The pack, as ComfyUI asks for it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)


def comfy_entrypoint() -> Outrigger:
    """Called once by ComfyUI when it loads the pack."""
    return Outrigger()
