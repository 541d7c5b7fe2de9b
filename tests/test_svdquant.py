"""A 4-bit Linear gives what its formula says, on one rank and on several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.linear import ParallelLinear
from runtime.mesh import Mesh
from runtime.quant.svdquant.core import HELD
from runtime.quant.svdquant.formats import INT4, NVFP4, UNSIGNED_INT4, Format
from runtime.quant.svdquant.tensors import Packing
from runtime.stored import IN_TORCH, Stored
from tests.ranks import relative_error, run_as_threads

KINDS = {"svdquant-int4": INT4, "svdquant-int4-unsigned": UNSIGNED_INT4, "svdquant-nvfp4": NVFP4}
RANK = 16
SHIFT = 0.171875
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def plain_tensors(n: int, k: int, form: Format) -> dict[str, torch.Tensor]:
    """Drawn numbers for a Linear, in plain form."""
    generator = torch.Generator().manual_seed(n + k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    scales = (normal(n, -(-k // form.group)).abs() + 0.1).to(form.scale_dtype)
    tensors = {
        "qweight": torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
        "wscales": scales,
        "proj_up": normal(n, RANK),
        "proj_down": normal(RANK, k),
        "smooth_factor": normal(k).abs() + 0.5,
        "bias": normal(n),
    }
    extra = {"wcscales": normal(n).abs(), "wtscale": torch.tensor([0.37])} if form.is_float else {}
    return tensors | extra


def nearest(values: torch.Tensor, table: list[float]) -> torch.Tensor:
    """Each value's nearest in a table."""
    table = torch.tensor(table, dtype=torch.float64)
    return table[(values[..., None] - table).abs().argmin(-1)]


def by_the_formula(x: torch.Tensor, tensors: dict[str, torch.Tensor], form: Format) -> torch.Tensor:
    """The Linear group by group in float64, from the published description alone."""
    tensors = {leaf: tensor.double() for leaf, tensor in tensors.items()}
    x = x.double()
    table = [*E2M1, *(-value for value in E2M1)] if form.is_float else [*range(8), *range(-8, 0)]
    weight = torch.tensor(table, dtype=torch.float64)[tensors["qweight"].long()]
    weight = weight * tensors.get("wcscales", torch.ones(len(weight)))[:, None] * tensors.get("wtscale", torch.ones(1))
    smoothed = (x + SHIFT if form.unsigned else x) / tensors["smooth_factor"]
    output = x @ tensors["proj_down"].T @ tensors["proj_up"].T + tensors["bias"]
    for group, start in enumerate(range(0, x.shape[1], form.group)):
        part = smoothed[:, start : start + form.group]
        largest = part.abs().amax(1, keepdim=True)
        if form.is_float:
            scale = (largest / 6).clamp(max=448).to(torch.float8_e4m3fn).double()
            codes = nearest((part / scale).abs(), E2M1) * part.sign()
        else:
            scale = largest / (15 if form.unsigned else 7)
            codes = nearest(part / scale, list(range(16) if form.unsigned else range(-7, 8)))
        output += (codes * scale) @ (weight[:, start : start + form.group] * tensors["wscales"][:, group, None]).T
    return output


def filled(
    n: int, k: int, kind: str, *, dtype: torch.dtype = torch.float32, kernels: str = IN_TORCH, **options: object
) -> ParallelLinear:
    """A layer of that kind with `plain_tensors`, as from a file."""
    form, linear = KINDS[kind], nn.Linear(k, n, device="meta", dtype=dtype)
    packing = Packing(n, k, RANK, form)
    packed = {leaf: packing.packed(leaf, tensor) for leaf, tensor in plain_tensors(n, k, form).items()}
    packed = {leaf: t.to(dtype) if t.element_size() > 1 and leaf != "wtscale" else t for leaf, t in packed.items()}
    stored = Stored(kind, {leaf: tuple(tensor.shape) for leaf, tensor in packed.items()}, kernels=kernels)
    layer = ParallelLinear(linear, stored=stored, **options)
    for leaf, tensor in packed.items():
        part = layer.local_part(leaf)
        if part is not None:
            part.place(part.cut.take(tensor))
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 384), (136, 192), (200, 320)])
@torch.inference_mode()
def test_the_plain_path_is_the_formula(n, k, kind):
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(1))
    x = nn.functional.gelu(x) if KINDS[kind].unsigned else x
    expected = by_the_formula(x, plain_tensors(n, k, KINDS[kind]), KINDS[kind])
    output = filled(n, k, kind)(x)
    assert output.dtype == torch.float32 and output.shape == (40, n)
    assert relative_error(output.double(), expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_in_half_the_bits_it_is_the_formula_but_for_rounding(kind):
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    x = nn.functional.gelu(x) if KINDS[kind].unsigned else x
    layer = filled(128, 128, kind, dtype=torch.bfloat16)
    output = layer(x.bfloat16())
    tensors = plain_tensors(128, 128, KINDS[kind])
    held = {leaf: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor for leaf, tensor in tensors.items()}
    expected = by_the_formula(x.bfloat16(), held, KINDS[kind])
    assert output.dtype == torch.bfloat16
    assert relative_error(output.double(), expected) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("part", [64, 128])
@torch.inference_mode()
def test_columns_and_rows_over_ranks_are_the_layer(part, degree, kind):
    """Activations round alike on every rank, because no group of features lies on two; the low rank costs no exchange."""
    n, k = part * degree, 128
    x = torch.randn(24, k, generator=torch.Generator().manual_seed(2)).abs()
    column, row = filled(n, k, kind), filled(k, n, kind)
    hidden = column(x)
    expected = row(hidden)

    def run(mesh: Mesh) -> None:
        group = mesh.group("tensor")
        local = filled(n, k, kind, mode="column", group=group)(x)
        own = slice(part * mesh.rank, part * (mesh.rank + 1))
        assert relative_error(local, hidden[:, own]) < 1e-6
        output = filled(k, n, kind, mode="row", group=group)(hidden[:, own])
        assert relative_error(output, expected) < 1e-6
        assert relative_error(filled(n, k, kind, mode="gather", group=group)(x), hidden) < 1e-6

    run_as_threads({"tensor": degree}, run)


@pytest.mark.parametrize("kind", ["svdquant-int4", "svdquant-nvfp4"])
@torch.inference_mode()
def test_a_plain_weight_is_made_one_as_it_is_loaded_the_same_on_every_rank(kind):
    full = nn.Linear(256, 192)
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(3))
    outputs = []

    def layer(**options: object) -> ParallelLinear:
        made = ParallelLinear(nn.Linear(256, 192, device="meta"), stored=Stored(kind), **options)
        for leaf, tensor in full.state_dict().items():
            part = made.local_part(leaf)
            if part is not None:
                part.place(part.cut.take(tensor))
        return made

    expected = layer()(x)
    assert relative_error(expected, full(x)) < 0.12

    def run(mesh: Mesh) -> None:
        group = mesh.group("tensor")
        row = layer(mode="row", group=group)(x[:, 128 * mesh.rank : 128 * (mesh.rank + 1)])
        outputs.append(relative_error(row, expected))

    run_as_threads({"tensor": 2}, run)
    assert max(outputs) < 1e-6


def test_the_weights_are_held_packed():
    packing = Packing(3072, 3072, 32, INT4)
    layer = ParallelLinear(nn.Linear(3072, 3072, device="meta").bfloat16(), stored=Stored("svdquant-int4"))
    assert {leaf: parameter.shape for leaf, parameter in layer.core.named_parameters()} == {
        leaf: packing.shape(leaf) for leaf in HELD
    }
    held = sum(parameter.nbytes for parameter in layer.core.parameters())
    assert 0.28 < held / (3072 * 3072 * 2) < 0.29
