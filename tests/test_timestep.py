"""A model in half precision is told its timestep as it is, and not rounded to its own format."""

from __future__ import annotations

import pytest
import torch

from runtime.families import FAMILIES
from runtime.mesh import Mesh
from runtime.naming import modules_called
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from tests.ranks import family_case, sample_request

ROUNDED = [name for name, family in FAMILIES.items() if family.rounded_timestep]


def waves(time: float, channels: int) -> torch.Tensor:
    """Cosines, then sines, of a time in float64."""
    steps = torch.arange(channels // 2, dtype=torch.float64)
    phases = time * torch.pow(torch.tensor(10000.0, dtype=torch.float64), -steps / (channels // 2))
    return torch.cat([phases.cos(), phases.sin()])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("family", ROUNDED)
def test_waves_are_those_of_the_exact_timestep(family, dtype):
    settings = ModelSettings(model=f"random:{family}", dtype=dtype)
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    wanted, made = [], []

    def note(_: torch.nn.Module, args: tuple, inputs: dict) -> None:
        wanted.append(inputs["timestep"][0])
        made.append([])

    [module] = modules_called(pipeline.transformer, FAMILIES[family].rounded_timestep[0]).values()
    module.register_forward_hook(lambda _, args, output: made[-1].append(output[0]))
    pipeline.transformer.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    pipeline.sample(sample_request(family_case(family, steps=3)), progress=ignore_progress)
    for (output, *_), timestep in zip(made, wanted, strict=True):
        assert (output.double() - waves(1000 * float(timestep), len(output))).abs().max() < 1e-3
