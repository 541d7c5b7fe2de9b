"""The number format of what some modules of a model are handed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .naming import modules_called


def take_model_dtype(model: nn.Module, pattern: str, *, dtype: torch.dtype) -> None:
    """Have the modules that a pattern fits, if there is one, take their first argument in the format of the model.

    Some classes work out the waves of a timestep in its own format, and hand them on so. Puts hooks on the modules.
    """
    for module in modules_called(model, pattern).values() if pattern else ():
        module.register_forward_pre_hook(lambda _, args: (args[0].to(dtype), *args[1:]))


def take_exact_timestep(model: nn.Module, pattern: str, *, factor: float) -> None:
    """Have the modules that a pattern fits make waves of the timestep as the model is handed it.

    Some classes round it to the format of the model before they multiply it by `factor`: bf16 has no 703.1, and waves of
    704 are another picture. ComfyUI makes them of float32; the guidance it rounds as these classes do, in a second call
    of the modules. Puts hooks on the model and the modules.
    """
    handed: list[torch.Tensor] = []

    def note(_: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
        handed[:] = [inputs["timestep"].float() * factor]

    def exact(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """The timestep in the place of the rounded one; what comes after it as it is."""
        if not handed:
            return args
        timestep = handed.pop()
        clean = timestep.new_zeros(len(args[0]) - len(timestep))  # where the class adds time 0, for references
        return (torch.cat([timestep, clean]),)

    model.register_forward_pre_hook(note, with_kwargs=True)
    for module in modules_called(model, pattern).values():
        module.register_forward_pre_hook(exact)
