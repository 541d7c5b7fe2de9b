"""Nunchaku's packed tensors are read and written as published, and cut for ranks without changing a number.

What they are read from is packed by address, in `nunchaku_packer`.
"""

from __future__ import annotations

import hashlib
import math
import random

import pytest
import torch
from torch import nn

from runtime.errors import Refused
from runtime.linear import ParallelLinear
from runtime.mesh import Mesh
from runtime.quant.awq import awq_linear, pack_awq, unpack_awq
from runtime.quant.svdquant import packing
from runtime.quant.svdquant.formats import INT4, NVFP4, code_values, round_e2m1, value_codes
from runtime.quant.svdquant.tensors import PackedCut, Packing, every
from runtime.stored import AWQ_INT4, Stored
from tests import nunchaku_packer
from tests.ranks import run_as_threads

RANK = 32
MICRO_WORDS = [0, 32, 64, 96, 8, 40, 72, 104, 16, 48, 80, 112, 24, 56, 88, 120, 1, 33, 65, 97]
"""The first rows of 128 whose words of 8-bit scales are read, by lanes 0 to 4."""


def drawn(*shape: int, below: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers from 0."""
    source = random.Random(f"{seed} {shape}")
    return torch.tensor([source.randrange(below) for _ in range(math.prod(shape))]).reshape(shape)


SIZES = [(128, 128), (256, 192 + 64), (384, 128)]


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_codes_are_read_where_the_layout_puts_them(n, k):
    codes = drawn(n, k, below=16).to(torch.uint8)
    packed = nunchaku_packer.packed_codes(codes)
    assert torch.equal(packing.unpack_codes(packed), codes)
    assert torch.equal(packing.pack_codes(codes), packed)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_scales_of_64_are_read_where_the_layout_puts_them(n, k):
    scales = drawn(n, k // 64, below=256).bfloat16()
    packed = nunchaku_packer.packed_scales(scales)
    assert torch.equal(packing.unpack_scales(packed), scales)
    assert torch.equal(packing.pack_scales(scales), packed)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_scales_of_16_are_read_where_the_layout_puts_them(n, k):
    scales = drawn(n, k // 16, below=127).to(torch.uint8).view(torch.float8_e4m3fn)
    packed = nunchaku_packer.packed_micro_scales(scales)
    assert same(packing.unpack_micro_scales(packed), scales)
    assert same(packing.pack_micro_scales(scales), packed)
    rows = torch.arange(128, dtype=torch.uint8)[:, None].repeat(1, 4)
    assert nunchaku_packer.packed_micro_scales(rows).flatten()[: 4 * len(MICRO_WORDS) : 4].tolist() == MICRO_WORDS


def test_vectors_are_read_in_the_order_of_the_lanes():
    vector = torch.arange(256.0)
    packed = nunchaku_packer.packed_vector(vector)
    assert packed[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    assert torch.equal(packing.unpack_vector(packed), vector)
    assert torch.equal(packing.pack_vector(vector), packed)


@pytest.mark.parametrize("rank", [16, 32, 48, 128])
def test_low_rank_matrices_are_read_where_the_layout_puts_them(rank):
    up, down = (drawn(*shape, below=256).bfloat16() for shape in ((128, rank), (rank, 256)))
    packed_up, packed_down = nunchaku_packer.packed_up(up), nunchaku_packer.packed_down(down)
    assert torch.equal(packing.unpack_up(packed_up), up)
    assert torch.equal(packing.unpack_down(packed_down), down)
    assert torch.equal(packing.pack_up(up), packed_up)
    assert torch.equal(packing.pack_down(down), packed_down)


UPSTREAM = {
    "codes": "54370a7ff9c7079a",
    "scales": "84d63b05caeebc78",
    "micro scales": "13a64c816bb04ee4",
    "vector": "ba2397c644fd6625",
    "up": "3e5c6f4f47dd79b3",
    "down": "30e037f21ca14a3f",
}
"""The first half of the SHA-256 of what Nunchaku's own packer (commit 3a3cc3d) makes of the numbers below."""


NAMES = {name: name.replace(" ", "_") for name in UPSTREAM}


@pytest.mark.parametrize("packer", ["pack", "packed"])
def test_what_is_packed_is_byte_for_byte_what_nunchaku_packs(packer):
    """By us, and by address in the tests."""

    def numbers(*shape: int) -> torch.Tensor:
        return drawn(*shape, below=256).bfloat16()

    plain = {
        "codes": drawn(256, 128, below=16),
        "scales": numbers(256, 2),
        "micro scales": drawn(256, 8, below=127).to(torch.uint8).view(torch.float8_e4m3fn),
        "vector": numbers(256, 1).flatten(),
        "up": numbers(256, 32),
        "down": numbers(32, 256),
    }
    module = packing if packer == "pack" else nunchaku_packer
    packed = {name: getattr(module, f"{packer}_{NAMES[name]}")(tensor) for name, tensor in plain.items()}
    hashes = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in packed.items()
    }
    assert hashes == UPSTREAM


def test_codes_stand_for_the_published_numbers():
    codes = torch.arange(16, dtype=torch.uint8)
    integers = [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]
    floats = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert code_values(codes, INT4).tolist() == integers
    assert code_values(codes, NVFP4).tolist() == floats
    assert value_codes(torch.tensor(integers), INT4).tolist() == codes.tolist()
    assert value_codes(torch.tensor(floats), NVFP4).tolist() == [*range(8), 0, *range(9, 16)]


def test_a_float_between_two_codes_goes_to_the_even_one():
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.75, 0.26, 2.51])
    assert round_e2m1(between).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1, 0.5, 3]


# Shards -------------------------------------------------------------------------------------------------------------


def plain_tensors(packing_: Packing) -> dict[str, torch.Tensor]:
    """Drawn numbers for each tensor in plain form, all different enough to be told apart."""
    n, k, form = packing_.n, packing_.k, packing_.form
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(1, 256, shape, generator=generator).to(torch.bfloat16)

    groups = -(-k // form.group)
    scales = torch.randint(1, 120, (n, groups), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        "qweight": torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
        "wscales": scales if form.is_float else numbers(n, groups),
        "proj_up": numbers(n, RANK),
        "proj_down": numbers(RANK, k),
        "smooth_factor": numbers(k),
        "bias": numbers(n),
        "wcscales": numbers(n),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = torch.uint8 if one.element_size() == 1 else torch.int16
    return one.shape == other.shape and torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


@pytest.mark.parametrize("form", [INT4, NVFP4], ids=["int4", "nvfp4"])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 192), (130, 320)])
def test_padding_comes_and_goes(n, k, form):
    packing_ = Packing(n, k, RANK, form)
    for leaf, tensor in plain_tensors(packing_).items():
        packed = packing_.packed(leaf, tensor)
        assert tuple(packed.shape) == packing_.shape(leaf)
        assert packed.shape[0] % 128 == 0 or leaf == "wscales"
        assert same(packing_.plain(leaf, packed), tensor), leaf


def spans(size: int, degree: int, rank: int, blocks: int) -> tuple[slice, ...]:
    part, block = size // blocks // degree, size // blocks
    return tuple(slice(i * block + rank * part, i * block + (rank + 1) * part) for i in range(blocks))


@pytest.mark.parametrize("form", [INT4, NVFP4], ids=["int4", "nvfp4"])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dim", ["n", "k"])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_packed_part_is_the_part_of_the_unpacked(degree, dim, blocks, form, monkeypatch):
    """Whole tiles, fused thirds too: nothing is unpacked on the way."""
    long, short = 128 * degree * blocks, 256
    full = Packing(*((long, short) if dim == "n" else (short, long)), RANK, form)
    tensors = plain_tensors(full)
    packed = {leaf: full.packed(leaf, tensor) for leaf, tensor in tensors.items()}
    for rank in range(degree):
        own = spans(long, degree, rank, blocks)
        places = torch.cat([torch.arange(span.start, span.stop) for span in own])
        for leaf, tensor in tensors.items():
            cut = PackedCut(leaf, full, *((own, every(short)) if dim == "n" else (every(short), own)))
            with monkeypatch.context() as patched:
                for name in vars(packing):
                    if name.startswith("unpack"):
                        patched.setattr(packing, name, None)
                part = cut.take(packed[leaf])
            layout = full.layout(leaf)
            axis, unit = (layout.n, 1) if dim == "n" else (layout.k, layout.group)
            expected = tensor if axis is None else tensor.index_select(axis, places[::unit] // unit)
            assert same(cut.local.plain(leaf, part), expected), leaf


@pytest.mark.parametrize("form", [INT4, NVFP4], ids=["int4", "nvfp4"])
@pytest.mark.parametrize(("n_part", "k_part"), [(32, 64), (96, 64), (40, 192)])
def test_parts_that_end_within_a_tile_have_the_same_numbers(n_part, k_part, form):
    full = Packing(n_part * 3, k_part * 3, RANK, form)
    for leaf, tensor in plain_tensors(full).items():
        rows, columns = (slice(n_part, 2 * n_part),), (slice(2 * k_part, 3 * k_part),)
        cut = PackedCut(leaf, full, rows, columns)
        part, layout = cut.take(full.packed(leaf, tensor)), full.layout(leaf)
        if layout.n is not None:
            tensor = tensor.narrow(layout.n, n_part, n_part)
        if layout.k is not None:
            tensor = tensor.narrow(layout.k, 2 * k_part // layout.group, k_part // layout.group)
        assert tuple(part.shape) == cut.local.shape(leaf)
        assert same(cut.local.plain(leaf, part), tensor), leaf


def test_a_cut_through_a_group_of_inputs_is_refused():
    with pytest.raises(Refused, match="32 to 64 of 128, and they are no whole groups of 64"):
        PackedCut("qweight", Packing(128, 128, RANK, INT4), every(128), (slice(32, 64),))


# The modulation: 4-bit weights for 16-bit inputs ---------------------------------------------------------------------


@pytest.mark.parametrize("parts", [3, 6])
@pytest.mark.parametrize("degree", [1, 2])
def test_modulation_is_read_in_the_order_of_the_class(degree, parts):
    """Rows lie feature by feature there, and the scales' biases have 1 added."""
    width = 128
    codes = drawn(parts * width, width, below=16)
    scales, zeros = (drawn(parts * width, width // 64, below=16, seed=s).float() for s in (1, 2))
    bias = drawn(parts * width, 1, below=16, seed=3).float().flatten()
    plain = codes.float() * scales.repeat_interleave(64, 1) - zeros.repeat_interleave(64, 1)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    expected = x @ plain.T + bias

    def in_file_order(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows[part * width + feature] for feature in range(width) for part in range(parts)])

    ones = torch.zeros(parts * width)
    for part in (1, parts - 2):
        ones[part * width : (part + 1) * width] = 1
    tensors = {
        "qweight": nunchaku_packer.packed_modulation(in_file_order(codes)),
        "wscales": in_file_order(scales).T.contiguous(),
        "wzeros": -in_file_order(zeros).T.contiguous(),
        "bias": in_file_order(bias + ones),
    }
    assert torch.equal(unpack_awq(tensors["qweight"]), in_file_order(codes).to(torch.uint8))
    assert torch.equal(pack_awq(in_file_order(codes)), tensors["qweight"])
    stored = Stored(AWQ_INT4, {leaf: tuple(tensor.shape) for leaf, tensor in tensors.items()})

    def layer(**options: object) -> ParallelLinear:
        made = ParallelLinear(nn.Linear(width, parts * width, device="meta"), stored=stored, **options)
        for leaf, tensor in tensors.items():
            part = made.local_part(leaf)
            part.place(part.cut.take(tensor))
        return made

    assert torch.allclose(layer()(x), expected, rtol=1e-4, atol=1e-3)

    def run(mesh: Mesh) -> None:
        gathered = layer(mode="gather", group=mesh.group("tensor"))
        assert torch.allclose(gathered(x), expected, rtol=1e-4, atol=1e-3)
        assert gathered.core.qweight.shape == (parts * width // 2, width // 2)

    if degree > 1:
        with torch.inference_mode():
            run_as_threads({"tensor": degree}, run)


@pytest.mark.parametrize("parts", [3, 6])
def test_a_modulation_that_is_rounded_is_the_plain_one_but_for_half_a_step(parts):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(parts * 128, 128, generator=generator)
    bias = torch.randn(parts * 128, generator=generator).bfloat16().float()
    tensors = awq_linear(weight, bias, torch.bfloat16)
    stored = Stored(AWQ_INT4, {leaf: tuple(tensor.shape) for leaf, tensor in tensors.items()})
    layer = ParallelLinear(nn.Linear(128, parts * 128, device="meta"), stored=stored)
    for leaf, tensor in tensors.items():
        part = layer.local_part(leaf)
        part.place(part.cut.take(tensor.float() if tensor.is_floating_point() else tensor))
    found = layer(torch.eye(128)) - layer(torch.zeros(1, 128))
    step = (weight.unflatten(1, (-1, 64)).amax(-1) - weight.unflatten(1, (-1, 64)).amin(-1)) / 15
    assert ((found.T - weight).abs().unflatten(1, (-1, 64)) <= 0.52 * step[..., None] + 0.02).all()
    assert (layer(torch.zeros(1, 128))[0] - bias).abs().max() < 0.02  # 1 more in bf16 has fewer bits behind the point
