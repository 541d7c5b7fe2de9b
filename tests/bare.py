"""The diffusers classes by themselves, with the random weights that ours have, and an Euler loop over them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import diffusers
import torch

from runtime.checkpoint import random_tensors
from runtime.families.spec import FamilySpec
from runtime.protocol import Conditioning
from runtime.sample_inputs import flow_table
from runtime.sampling import make_sigmas
from tests.ranks import Case, sample_request


@torch.inference_mode()
def plain_euler(
    case: Case, family: FamilySpec, velocity: Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]
) -> torch.Tensor:
    """What the request asks for, written out over an untouched diffusers model with the same random weights."""
    request = sample_request(case)
    x = torch.randn(case.latent, generator=torch.Generator().manual_seed(request.settings.seed))
    table = flow_table(request.settings, family, x.shape)
    sigmas = make_sigmas("simple", case.steps, table=table, sampler_name="euler")
    for sigma, following in pairwise(sigmas):
        guided = velocity(x, sigma, request.positive[0])
        if case.cfg != 1.0:
            negative = velocity(x, sigma, request.negative[0])
            guided = negative + (guided - negative) * case.cfg
        x = x + guided * (following - sigma)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    mean, std = (torch.tensor(values).view(shape) for values in (family.latent.mean, family.latent.std))
    return x * std + mean


def bare_model(family: FamilySpec) -> torch.nn.Module:
    """The diffusers class with the weights of `random:FAMILY`."""
    model = getattr(diffusers, family.transformer_class)(**family.tiny).eval()
    model.load_state_dict(random_weights(model))
    return model


def random_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that `random:wan` has."""
    return dict(random_tensors({name: tensor.shape for name, tensor in model.state_dict().items()}))
