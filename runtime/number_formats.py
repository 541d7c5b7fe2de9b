"""In which number formats weights are held."""

from __future__ import annotations

import torch

from .mesh import Mesh
from .settings import AUTO, ModelSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""By kind of device. Text encoders always run in these: T5 overflows in fp16."""


def dtype_of(settings: ModelSettings, mesh: Mesh) -> torch.dtype:
    """That of plain weights."""
    return AUTO_DTYPE[mesh.device.type] if settings.dtype == AUTO else DTYPES[settings.dtype]
