"""Files of both generations, packed by address from drawn numbers, are what the published formula makes of those numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from runtime.checkpoint import build_transformer, random_tensors
from runtime.families import FAMILIES
from runtime.inspection import inspect_model
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from tests.nunchaku_packer import packed_linear
from tests.ranks import Case, relative_error, run_as_threads, run_case, sample_request
from tests.test_nunchaku_file import OLD_NAMES, modulation
from tests.test_svdquant import KINDS, by_the_formula
from tests.test_svdquant_ranks import FLIP_LIMIT, LATENTS

INT4, UNSIGNED, NVFP4 = KINDS
SINGLE = {"qkv_proj": ("attn.to_q", "attn.to_k", "attn.to_v")}
DOUBLE = {**SINGLE, "qkv_proj_context": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")}
FILES = {
    "flux": {
        "transformer_blocks": DOUBLE
        | {"out_proj": ("attn.to_out.0",), "out_proj_context": ("attn.to_add_out",)}
        | {"mlp_fc1": ("ff.net.0.proj",), "mlp_fc2": ("ff.net.2",)}
        | {"mlp_context_fc1": ("ff_context.net.0.proj",), "mlp_context_fc2": ("ff_context.net.2",)},
        "single_transformer_blocks": SINGLE
        | {"mlp_fc1": ("proj_mlp",), "out_proj": ("proj_out",), "mlp_fc2": ("proj_out",)},
    },
    "qwen": {
        "transformer_blocks": {"attn.to_qkv": DOUBLE["qkv_proj"], "attn.add_qkv_proj": DOUBLE["qkv_proj_context"]}
        | {name: (name,) for name in ("attn.to_out.0", "attn.to_add_out")}
        | {f"{side}_mlp.net.{name}": (f"{side}_mlp.net.{name}",) for side in ("img", "txt") for name in ("0.proj", "2")}
    },
}
"""What Nunchaku's files call the Linears of a block, and those of the class that each is of."""
AFTER_GELU = ("mlp_fc2", "mlp_context_fc2", "img_mlp.net.2", "txt_mlp.net.2")
MODULATIONS = {
    "flux": {
        "transformer_blocks": {"norm1.linear": 6, "norm1_context.linear": 6},
        "single_transformer_blocks": {"norm.linear": 3},
    },
    "qwen": {"transformer_blocks": {"img_mod.1": 6, "txt_mod.1": 6}},
}
BITS = {
    INT4: {"dtype": "int4", "scale_dtype": None, "group_size": 64},
    NVFP4: {"dtype": "fp4_e2m1_all", "scale_dtype": [None, "fp8_e4m3_nan"], "group_size": 16},
}


class Formula(nn.Module):
    """The sum of some 4-bit Linears in float64, each over its own inputs and with some of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[dict[str, torch.Tensor], str]] = []

    def add(self, plain: dict[str, torch.Tensor], kind: str, rows: slice) -> None:
        by_row = ("qweight", "wscales", "proj_up", "bias", "wcscales")
        self.parts.append(({leaf: each[rows] if leaf in by_row else each for leaf, each in plain.items()}, kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.split([plain["qweight"].shape[1] for plain, _ in self.parts], dim=-1)
        outputs = [
            by_the_formula(piece.flatten(0, -2), plain, KINDS[kind])
            for piece, (plain, kind) in zip(pieces, self.parts, strict=True)
        ]
        return sum(outputs).to(x.dtype).unflatten(0, x.shape[:-1])


@dataclass
class Written:
    """The tensors of a file, and the modules that stand for them in the class."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)


def drawn_linear(n: int, k: int, kind: str, *, rank: int, fused: bool, seed: int) -> dict[str, torch.Tensor]:
    """Numbers of a Linear whose output is about as large as its input, exact in the formats of a file."""
    generator = torch.Generator().manual_seed(seed)

    def spread(*shape: int, by: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * by).bfloat16()

    def around(*shape: int, size: float) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5) * size

    is_float, size = kind == NVFP4, 0.2 * k**-0.5
    scales = (
        around(n, k // 16, size=1).to(torch.float8_e4m3fn) if is_float else around(n, k // 64, size=size).bfloat16()
    )
    whole = {"wcscales": around(n, size=size).bfloat16()} if fused else {"wtscale": torch.tensor([size]).bfloat16()}
    smooth = around(k, size=1).bfloat16()
    return {
        "qweight": torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
        "wscales": scales,
        "proj_up": spread(n, rank, by=0.3),
        "proj_down": spread(rank, k, by=(k * rank) ** -0.5),
        "smooth_factor": smooth,
        "smooth_factor_orig": smooth,
        "bias": spread(n, by=0.1),
        **(whole if is_float else {}),
    }


def four_bit(family: str, kind: str, rank: int, shapes: dict[str, Any]) -> Iterator[tuple[str, dict, str, list[str]]]:
    """Each 4-bit Linear of a file: its name there, drawn numbers, kind, and the Linears of the class that it is."""
    for blocks, linears in FILES[family].items():
        for block in range(2):
            for number, (stored, names) in enumerate(linears.items()):
                names = [f"{blocks}.{block}.{name}" for name in names]
                rows, k = shapes[f"{names[0]}.weight"]
                k = {"out_proj": 128, "mlp_fc2": 512}[stored] if names[0].endswith("proj_out") else k
                own = UNSIGNED if kind == INT4 and stored in AFTER_GELU else kind
                seed, fused = 100 * block + number, len(names) > 1
                plain = drawn_linear(rows * len(names), k, own, rank=rank, fused=fused, seed=seed)
                yield f"{blocks}.{block}.{stored}", plain, own, names


def written(family: str, kind: str, rank: int, *, first_names: bool) -> Written:
    """A file of the tiny model of a family."""
    _, shapes = build_transformer(inspect_model(f"random:{family}"))
    plain, file = dict(random_tensors(shapes)), Written()
    for stored, numbers, own, names in four_bit(family, kind, rank, shapes):
        leaves = OLD_NAMES if first_names else {}
        file.tensors |= {f"{stored}.{leaves.get(leaf, leaf)}": each for leaf, each in packed_linear(numbers).items()}
        rows = len(numbers["qweight"]) // len(names)
        for number, name in enumerate(names):
            formula = file.modules.setdefault(name, Formula())
            formula.add(numbers, own, slice(number * rows, (number + 1) * rows))
    for blocks, linears in MODULATIONS[family].items():
        for name, parts in (
            (f"{blocks}.{block}.{name}", parts) for block in range(2) for name, parts in linears.items()
        ):
            weight, packed = modulation(parts, len(file.tensors), plain[f"{name}.bias"])
            file.tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in packed.items()}
            file.modules[name] = linear = nn.Linear(128, len(weight))
            linear.weight.data, linear.bias.data = weight, plain[f"{name}.bias"]
    for name, tensor in plain.items():
        if name.rpartition(".")[0] not in file.modules:
            file.tensors[name.replace("attn.norm_", "norm_") if first_names else name] = tensor
    return file


def metadata(family: str, kind: str, rank: int) -> dict[str, str]:
    """What official files say of themselves."""
    spec = FAMILIES[family]
    bits = {"method": "svdquant", "weight": BITS[kind], "activation": BITS[kind], "rank": rank}
    config = {"_class_name": spec.transformer_class, **spec.tiny}
    return {"config": json.dumps(config), "quantization_config": json.dumps(bits)}


CASES = [("flux", INT4, 32, True), ("qwen", NVFP4, 128, False)]
MORE = [("flux", NVFP4, 128, True), ("flux", INT4, 128, False), ("qwen", INT4, 32, False)]


@pytest.mark.parametrize(
    ("family", "kind", "rank", "first_names"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
@torch.inference_mode()
def test_a_file_that_is_packed_by_address_is_its_formula(family, kind, rank, first_names, tmp_path: Path):
    file, path = written(family, kind, rank, first_names=first_names), tmp_path / "x.safetensors"
    save_file(file.tensors, path, metadata=metadata(family, kind, rank))
    case = Case(model=str(path), family=family, latent=LATENTS[family], steps=1)
    errors: dict[str, float] = {}
    pipeline, plain = (
        Pipeline.load(ModelSettings(model=model), mesh=Mesh.single(), progress=ignore_progress)
        for model in (str(path), f"random:{family}")
    )
    for name, module in file.modules.items():

        def compare(
            _: nn.Module, args: tuple, output: torch.Tensor, name: str = name, module: nn.Module = module
        ) -> None:
            errors[name] = max(errors.get(name, 0.0), relative_error(output, module(args[0])))

        pipeline.transformer.get_submodule(name).register_forward_hook(compare)
        plain.transformer.set_submodule(name, module)
    latent, reference = (each.sample(sample_request(case), progress=ignore_progress) for each in (pipeline, plain))
    whole = relative_error(latent, reference)
    over_ranks = run_as_threads({"tensor": 2}, lambda mesh: relative_error(run_case(case, mesh, {}), reference))
    print(f"Linears {max(errors.values()):.1e}, latent {whole:.1e}, over two tensor ranks {max(over_ranks):.1e}")
    assert errors.keys() == file.modules.keys() and max(errors.values()) < 1e-5
    assert max(whole, *over_ranks) < FLIP_LIMIT
