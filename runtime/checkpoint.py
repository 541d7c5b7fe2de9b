"""A transformer from its files: built without weights, then filled tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import diffusers
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .errors import Refused
from .families.spec import FamilySpec
from .inspection import ModelFacts
from .progress import ReportProgress

STAGE = "loading"
REPORTS = 50
"""At most so many progress reports (and chances to cancel) in a load."""
NAMED = 5
RANDOM_SEED = 0


def load_transformer(
    facts: ModelFacts, *, dtype: torch.dtype, device: torch.device, progress: ReportProgress
) -> nn.Module:
    """The model on `device`, in `dtype` but for what its family keeps in float32.

    On a CPU a tensor that has the right dtype stays where it is in the file, and ranks share its pages. Raises
    `Refused` when the tensors are not those of the model, `Cancelled` when the job is stopped.
    """
    model = _build(facts)
    if facts.sources:
        _check_names(model, facts)
        tensors = _stored(model, facts)
    else:
        tensors = _random(model)
    _fill(model, tensors, family=facts.spec, dtype=dtype, device=device, progress=progress)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(f"{name} of {facts.spec.transformer_class} was left without a value")
    return model.to(device)


def _build(facts: ModelFacts) -> nn.Module:
    """The class without weights, and with the tables that it computes for itself."""
    family = facts.spec
    try:
        with torch.device("meta"):
            model = getattr(diffusers, family.transformer_class)(**facts.config)
    except (TypeError, ValueError) as error:
        raise Refused(f"{facts.name} has a configuration that {family.transformer_class} refuses: {error}") from error
    for table in family.rebuilt:
        arguments = {argument: model.config[key] for argument, key in table.arguments}
        module = model.get_submodule(table.module)
        model.set_submodule(table.module, type(module)(**arguments))
    return model.eval().requires_grad_(False)


def _check_names(model: nn.Module, facts: ModelFacts) -> None:
    needed = model.state_dict().keys()
    present = {name for source in facts.sources for name in source.names}
    where = facts.sources[0].path
    for what, names in (("lacks", needed - present), ("has unknown", present - needed)):
        if names:
            first = ", ".join(sorted(names)[:NAMED])
            raise Refused(
                f"{where} {what} {len(names)} tensor{'s'[: len(names) > 1]} of {facts.spec.title}: {first}"
                f"{' ...' if len(names) > NAMED else ''}. Download the file again, or choose a checkpoint of this family"
            )


def _stored(model: nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for source in facts.sources:
        try:
            with safe_open(source.path, framework="pt", device="cpu") as file:
                for name, stored in source.names.items():
                    tensor = file.get_tensor(stored)
                    if tensor.shape != shapes[name]:
                        raise Refused(
                            f"{source.path}: {stored} has shape {tuple(tensor.shape)}, but this {facts.spec.title} "
                            f"needs {tuple(shapes[name])}: download the file again"
                        )
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise Refused(f"{source.path} cannot be read: {error}") from error


def _random(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same random weights in every process, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    for name, tensor in model.state_dict().items():
        drawn = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            yield name, drawn / tensor[0].numel() ** 0.5
        else:
            yield name, drawn * 0.1 + ("norm" in name and name.endswith("weight"))


def _fill(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    family: FamilySpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: ReportProgress,
) -> None:
    total = len(model.state_dict())
    stride = -(-total // REPORTS)
    for count, (name, tensor) in enumerate(tensors, start=1):
        module, _, leaf = name.rpartition(".")
        tensor = tensor.to(device=device, dtype=torch.float32 if _stays_float32(family, name) else dtype)
        model.get_submodule(module).load_state_dict({leaf: tensor}, strict=False, assign=True)
        if count % stride == 0 or count == total:
            progress(STAGE, count, total)


def _stays_float32(family: FamilySpec, name: str) -> bool:
    return not set(family.keep_float32).isdisjoint(name.split("."))
