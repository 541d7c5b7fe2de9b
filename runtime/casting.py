"""The number format of what some modules of a model are handed."""

from __future__ import annotations

import torch
from torch import nn

from .naming import modules_called


def take_model_dtype(model: nn.Module, pattern: str, *, dtype: torch.dtype) -> None:
    """Have the modules that a pattern fits, if there is one, take their first argument in the format of the model.

    Some classes work out the waves of a timestep in its own format, and hand them on so. Puts hooks on the modules.
    """
    for module in modules_called(model, pattern).values() if pattern else ():
        module.register_forward_pre_hook(lambda _, args: (args[0].to(dtype), *args[1:]))
