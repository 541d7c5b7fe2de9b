"""The waves a model is told its timestep by, in the rounding that ComfyUI gives them."""

from __future__ import annotations

import torch
from torch import nn

MAX_PERIOD = 10000


class TimestepWaves(nn.Module):
    """Cosines, then sines, of the timestep at falling frequencies (Vaswani et al. 2017, arXiv:1706.03762).

    Stands in for diffusers' module of the same formula, which takes the frequencies from `exp(-k log 10000)`: in float32
    that is off by up to 5e-7, and so the phase of timestep 1000 by 2e-5, which a trained model shows in the picture.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._half = channels // 2

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """`(B,)` -> `(B, channels)`, float32."""
        timesteps = timesteps.float()
        steps = torch.arange(self._half, device=timesteps.device, dtype=torch.float32)
        phases = torch.outer(timesteps, torch.pow(MAX_PERIOD, -steps.div(self._half)))
        return torch.cat([torch.cos(phases), torch.sin(phases)], dim=1)
