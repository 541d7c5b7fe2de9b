"""Random LoRA files for a model, in the layouts that people have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.pipeline import Pipeline
from runtime.settings import LoraSettings

RANK, ALPHA = 4, 3.0
SPREAD = 0.02
"""Of the numbers of a product, where those of a weight spread by 0.06 to 0.09."""
Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
"""Of the weight of each layer, by the layer's name."""


class Draw:
    """Random tensors, the same in every run."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, spread: float = SPREAD) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * spread


def pair(shape: tuple[int, ...], draw: Draw, *, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """Down and up of a layer; of a convolution with a kernel behind."""
    ones = (1,) * (len(shape) - 2)
    return draw(rank, *shape[1:]), draw(shape[0], rank, *ones, spread=rank**-0.5)


def pairs(
    layers: Shapes, draw: Draw, *, down: str, up: str, name: Callable[[str], str], alpha: bool = False, rank: int = RANK
) -> Tensors:
    """A low-rank pair for each layer, its keys being `name(layer)` and `down` and `up`."""
    tensors: Tensors = {}
    for layer, shape in layers.items():
        tensors[f"{name(layer)}{down}"], tensors[f"{name(layer)}{up}"] = pair(shape, draw, rank=rank)
        if alpha:
            tensors[f"{name(layer)}.alpha"] = torch.tensor(ALPHA)
    return tensors


def dotted(layer: str) -> str:
    return f"diffusion_model.{layer}"


def flat(layer: str) -> str:
    return "lora_unet_" + layer.replace(".", "_")


def kohya(layers: Shapes, draw: Draw, *, alpha: bool = True, name: Callable[[str], str] = flat) -> Tensors:
    return pairs(layers, draw, down=".lora_down.weight", up=".lora_up.weight", name=name, alpha=alpha)


def peft(layers: Shapes, draw: Draw, *, adapter: str = "", name: Callable[[str], str] = dotted) -> Tensors:
    return pairs(layers, draw, down=f".lora_A{adapter}.weight", up=f".lora_B{adapter}.weight", name=name)


def dora(layers: Shapes, draw: Draw, *, by_row: bool) -> Tensors:
    """Magnitudes for the rows or the columns of each layer, which is about 1 / sqrt(in) in each of its numbers."""
    tensors = kohya(layers, draw)
    for layer, (out, into, *kernel) in layers.items():
        shape = (out, 1, *(1 for _ in kernel)) if by_row else (1, into, *(1 for _ in kernel))
        length = 1.0 if by_row else (out / into) ** 0.5
        tensors[f"{flat(layer)}.dora_scale"] = length * (1 + draw(*shape, spread=0.1))
    return tensors


def loha(layers: Shapes, draw: Draw, *, rank: int) -> Tensors:
    tensors: Tensors = {}
    for layer, (out, into) in layers.items():
        for factor in (1, 2):
            tensors[f"{flat(layer)}.hada_w{factor}_a"] = draw(out, rank, spread=rank**-0.5)
            tensors[f"{flat(layer)}.hada_w{factor}_b"] = draw(rank, into, spread=SPREAD if factor == 1 else 1.0)
        tensors[f"{flat(layer)}.alpha"] = torch.tensor(ALPHA)
    return tensors


def lokr(layers: Shapes, draw: Draw, *, low: str, factor: int = 4) -> Tensors:
    """`low` names the factors that are low-rank products themselves: "", "1", "2" or "12"."""
    tensors: Tensors = {}
    for layer, (out, into) in layers.items():
        shapes = {"1": (factor, factor), "2": (out // factor, into // factor)}
        for number, (rows, columns) in shapes.items():
            key = f"{flat(layer)}.lokr_w{number}"
            if number in low:
                tensors[f"{key}_a"], tensors[f"{key}_b"] = draw(rows, 2, spread=0.5), draw(2, columns, spread=0.2)
            else:
                tensors[key] = draw(rows, columns, spread=0.3 if number == "1" else 0.1)
        tensors[f"{flat(layer)}.alpha"] = torch.tensor(ALPHA)
    return tensors


def differences(
    shapes: Mapping[str, tuple[int, ...]], draw: Draw, names: Iterable[str], *, key: str, spread: float = 0.05
) -> Tensors:
    """Full differences of some tensors; `key` makes the key of the file from the tensor's name."""
    layers = {name: name.removesuffix(".weight").removesuffix(".bias") for name in names}
    return {key.format(layer): draw(*shapes[name], spread=spread) for name, layer in layers.items()}


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {key: tensor.to(dtype) for key, tensor in tensors.items()}


def added(tensors: Mapping[str, Any], layer: str) -> torch.Tensor:
    """What a kohya file adds to a layer, in float64."""
    down, up = (tensors[f"{flat(layer)}.lora_{side}.weight"].double().flatten(1) for side in ("down", "up"))
    alpha = tensors.get(f"{flat(layer)}.alpha")
    return (1.0 if alpha is None else float(alpha) / len(down)) * (up @ down)


def write(path: Path, tensors: dict[str, torch.Tensor], strength: float = 1.0) -> LoraSettings:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return LoraSettings(path=str(path), strength=strength)


def weights_of(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Every weight of the transformer, whatever holds it; and the pairs beside them."""
    model = pipeline.transformer
    return {name.replace(".core.", "."): parameter for name, parameter in model.named_parameters()}
