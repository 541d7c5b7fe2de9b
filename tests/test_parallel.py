"""Ring and tensor parallel are exact, hold and send no more than they must, and would be seen to be missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from runtime import checkpoint, linear, reading, replicas
from runtime.checkpoint import build_transformer, fill_transformer, random_tensors
from runtime.families.cuts import TokenPlace
from runtime.families.wan import TINY, WAN
from runtime.inspection import inspect_model
from runtime.linear import ParallelLinear, ParallelRMSNorm, swap_linears
from runtime.mesh import Mesh
from runtime.parallel import collectives, ring, ulysses
from runtime.parallel.attention import attention_with_lse, merge
from runtime.parallel.ring import ring_attention
from runtime.parallel.shares import Cut, even_lengths, span
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning
from runtime.replicas import Replicas
from runtime.sequence import Sequence
from runtime.settings import ModelSettings
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_on_one

LIMIT = 2e-6
WIDTH = TINY["num_attention_heads"] * TINY["attention_head_dim"]


# Attention over parts of the keys -----------------------------------------------------------------------------------


def masks_of(name: str, batch: int, heads: int, keys: int) -> torch.Tensor | None:
    """A mask over all keys; each leaves at least one key to each item."""
    if name == "padded":
        return torch.arange(keys).expand(batch, 1, 1, keys) < torch.tensor([keys, 2]).view(2, 1, 1, 1)
    if name == "per head":
        return torch.randn(1, heads, 1, keys)
    return None


def reference_attention(query, key, value, mask) -> torch.Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)


@pytest.mark.parametrize("mask", ["none", "padded", "per head"])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 3), (3, 0), (3, 2, 2)])
def test_a_ring_is_exact_for_any_lengths_and_masks(lengths, mask):
    query, key, value = torch.randn(3, 2, sum(lengths), 4, 16)
    mask = masks_of(mask, 2, 4, sum(lengths))
    expected = reference_attention(query, key, value, mask)

    def run(mesh: Mesh) -> None:
        part = span(lengths, mesh.rank)
        local = [tensor[:, part] for tensor in (query, key, value)]
        output = ring_attention(*local, lengths=lengths, group=mesh.group("ring"), mask=mask)
        assert output.shape == local[0].shape
        assert torch.allclose(output, expected[:, part], atol=1e-6)

    run_as_threads({"ring": len(lengths)}, run)


@pytest.mark.parametrize("mask", ["none", "padded", "per head"])
@pytest.mark.parametrize(
    "degrees",
    [{"ulysses": 2}, {"ulysses": 3}, {"ring": 2}, {"ring": 2, "ulysses": 2}, {"ring": 2, "ulysses": 3}],
    ids=str,
)
@pytest.mark.parametrize("tokens", [(8,), (7,), (5, 9)])
def test_masks_and_streams_are_exact_over_ring_and_ulysses(degrees, tokens, mask):
    """With two streams a rank has a part of each; a mask arrives split as the tokens are."""
    total, places = sum(tokens), [TokenPlace("", stream=str(number)) for number in range(len(tokens))]
    full = torch.randn(3, 2, total, 4, 16)
    mask = masks_of(mask, 2, 4, total)
    expected = reference_attention(*full, mask)

    def run(mesh: Mesh) -> None:
        sequence = Sequence(mesh, heads=4)

        def local(tensor: torch.Tensor) -> torch.Tensor:
            streams = zip(tensor.split(tokens, dim=1), places, strict=True)
            return torch.cat([sequence.split(*stream) for stream in streams], dim=1)

        local_mask = None if mask is None else local(mask.transpose(1, 3)).transpose(1, 3)
        for _ in range(2):
            output = sequence.attend(*map(local, full), mask=local_mask)
            assert torch.allclose(output, local(expected), atol=1e-6)

    run_as_threads(degrees, run)


def test_a_query_that_may_attend_to_nothing_in_a_part_takes_nothing_from_it():
    query, key, value = torch.randn(3, 1, 4, 2, 8)
    nothing = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    whole, part = (attention_with_lse(query, key, value, mask=mask) for mask in (None, nothing))
    assert not part[0].any() and (part[1] == -torch.inf).all()
    for output, lse in (merge(*whole, *part), merge(*part, *whole)):
        assert torch.allclose(output, whole[0]) and torch.allclose(lse, whole[1])
    assert not merge(*part, *part)[0].isnan().any()


@pytest.mark.parametrize(
    ("mask", "words"),
    [(torch.zeros(1, 1, 4, 8), "cannot be split"), (torch.zeros(1, 1, 1, 7), "7 keys"), (None, "came to attention")],
)
def test_what_cannot_be_split_is_an_error_and_not_ignored(mask, words):
    def run(mesh: Mesh) -> None:
        sequence = Sequence(mesh, heads=4)
        local = sequence.split(torch.randn(1, 8, 4, 16), TokenPlace(""))
        local = local[:, :3] if mask is None else local
        with pytest.raises(RuntimeError, match=words):
            sequence.attend(local, local, local, mask=mask)

    run_as_threads({"ring": 2}, run)


# Cut weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "blocks"), [(10, (1,)), (10, (1, 4)), (21, (2, 1)), (3, (1,)), (60, (1, 4))])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("grain", [1, 4])
def test_the_cuts_of_all_ranks_are_the_whole_block_by_block(size, blocks, degree, grain):
    full, unit = torch.arange(2.0 * size).view(2, size), size // sum(blocks)
    cuts = [Cut.of_blocks(1, size, blocks=blocks, rank=rank, degree=degree, grain=grain) for rank in range(degree)]
    parts = [cut.take(full) for cut in cuts]
    assert torch.equal(torch.cat(parts, dim=1).sort().values, full)
    assert all(part.is_contiguous() for part in parts)
    for place, block in enumerate(blocks):
        whole = grain if block * unit % grain == 0 else 1
        sizes = [cut.spans[place].stop - cut.spans[place].start for cut in cuts]
        assert sizes == [whole * count for count in even_lengths(block * unit // whole, degree)]


def test_features_that_are_not_such_blocks_are_refused():
    with pytest.raises(ValueError, match="10 features are not blocks"):
        Cut.of_blocks(0, 10, blocks=(1, 2), rank=0, degree=2)


def filled(layer: nn.Module, full: nn.Module) -> nn.Module:
    """A layer that stands in for `full`, with its own part of what that holds."""
    for leaf, tensor in full.state_dict().items():
        part = layer.local_part(leaf)
        if part is not None:
            part.module.load_state_dict({part.leaf: part.cut.take(tensor)}, strict=False, assign=True)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("degree", [2, 3])
@torch.inference_mode()
def test_a_column_and_a_row_of_fused_blocks_are_the_two_layers(bias, degree):
    """Two columns whose outputs are joined, and a row over both: the last layer of Flux's single blocks."""
    first, second, last = nn.Linear(6, 12, bias), nn.Linear(6, 48, bias), nn.Linear(60, 7, bias)
    x = torch.randn(2, 5, 6)
    expected = last(torch.cat([first(x), second(x)], dim=-1))

    def run(mesh: Mesh) -> None:
        group = mesh.group("tensor")
        columns = [filled(ParallelLinear(full, mode="column", group=group), full) for full in (first, second)]
        row = filled(ParallelLinear(last, mode="row", blocks=(1, 4), group=group), last)
        assert torch.allclose(row(torch.cat([column(x) for column in columns], dim=-1)), expected, atol=1e-6)
        assert (row.in_features, row.out_features) == (60, 7)
        whole, gathered = (filled(ParallelLinear(first, mode=mode, group=group), first) for mode in ("whole", "gather"))
        assert torch.allclose(whole(x), first(x)) and torch.allclose(gathered(x), first(x), atol=1e-6)

    run_as_threads({"tensor": degree}, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_norm_over_a_cut_width_is_the_norm(dtype):
    norm = nn.RMSNorm(12, eps=1e-6)
    nn.init.normal_(norm.weight)
    norm, x = norm.to(dtype), torch.randn(2, 3, 12).to(dtype)
    expected = norm(x)

    def run(mesh: Mesh) -> None:
        group = mesh.group("tensor")
        part = span(even_lengths(12, 3), mesh.rank)
        output = filled(ParallelRMSNorm(norm, group=group), norm)(x[..., part])
        assert output.dtype == dtype
        assert torch.allclose(output, expected[..., part], atol=1e-6 if dtype == torch.float32 else 1e-2)

    run_as_threads({"tensor": 3}, run)


def test_heads_that_cannot_be_dealt_out_are_an_error():
    def run(mesh: Mesh) -> None:
        model, _ = build_transformer(inspect_model("random:wan"))
        with pytest.raises(ValueError, match="4 heads"):
            swap_linears(model, WAN.tensor, head_dim=32, group=mesh.group("tensor"))

    run_as_threads({"tensor": 5}, run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny Wan with its random weights, as a diffusers transformer folder."""
    _, shapes = build_transformer(inspect_model("random:wan"))
    save_file(
        {name: tensor.contiguous() for name, tensor in random_tensors(shapes)},
        tmp_path / "diffusion_pytorch_model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": WAN.transformer_class, **TINY}))
    return tmp_path


def test_each_rank_reads_and_holds_its_own_part_of_the_weights(folder, monkeypatch):
    facts, read = inspect_model(str(folder)), Counter()

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        read[dist.get_rank()] += tensor.nbytes
        return tensor

    class CountedSlice:
        def __init__(self, piece: Any) -> None:
            self.get_shape, self._piece = piece.get_shape, piece

        def __getitem__(self, place: Any) -> torch.Tensor:
            return counted(self._piece[place])

    class CountedFile:
        def __init__(self, path: Path) -> None:
            self._file = safe_open(path, framework="pt", device="cpu")

        def __enter__(self) -> CountedFile:
            return self

        def __exit__(self, *error: object) -> None: ...

        def get_tensor(self, name: str) -> torch.Tensor:
            return counted(self._file.get_tensor(name))

        def get_slice(self, name: str) -> CountedSlice:
            return CountedSlice(self._file.get_slice(name))

    monkeypatch.setattr(reading, "mapped_safetensors", CountedFile)
    monkeypatch.setattr(reading, "TensorFile", CountedFile)
    monkeypatch.setattr(checkpoint, "READERS", 0)  # the rank's own thread knows which rank it is

    def run(mesh: Mesh) -> int:
        model, shapes = build_transformer(facts)
        swap_linears(model, WAN.tensor, head_dim=facts.head_dim, group=mesh.group("tensor"))
        options = {"dtype": torch.float32, "device": torch.device("cpu"), "progress": ignore_progress}
        fill_transformer(model, facts, shapes=shapes, **options)
        return sum(parameter.nbytes for parameter in model.parameters())

    held = run_as_threads({"tensor": 2}, run)
    full = sum(tensor.nbytes for tensor in build_transformer(facts)[0].parameters())
    print("of the bytes, each rank holds", [f"{bytes_ / full:.3f}" for bytes_ in held])
    assert max(held) < 0.56 * full
    assert [read[rank] for rank in range(2)] == held


def test_a_checkpoint_over_tensor_ranks_gives_the_latent_of_one(folder):
    case = Case(model=str(folder), degrees={"tensor": 2})
    [reference] = run_on_one([case])
    for result in run_as_threads(case.degrees, lambda mesh: run_case(case, mesh, {})):
        assert relative_error(result, reference) < LIMIT


# What goes over the wire --------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[int, Counter]:
    """Bytes that leave each rank, by kind of exchange, at their least: an all-reduce is a reduce-scatter and a gather."""
    counts = {rank: Counter() for rank in range(8)}
    exchange, reduce, gather = dist.all_to_all_single, dist.all_reduce, collectives._all_gather

    def all_to_all_single(output, tensor, output_splits, input_splits, group, async_op=False):
        own = input_splits[dist.get_rank(group)]
        row = tensor[:1].nbytes if len(tensor) else 0
        counts[dist.get_rank()]["exchange"] += (sum(input_splits) - own) * row
        return exchange(output, tensor, output_splits, input_splits, group=group, async_op=async_op)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        degree = dist.get_world_size(group)
        if tensor.numel() > 1:  # and no number that they agree on
            counts[dist.get_rank()]["reduce"] += 2 * (degree - 1) * tensor.nbytes // degree
        return reduce(tensor, op=op, group=group)

    def all_gather(output, tensor, group):
        counts[dist.get_rank()]["gather"] += (dist.get_world_size(group) - 1) * tensor.nbytes
        return gather(output, tensor, group=group)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(collectives, "_all_gather", all_gather)
    return counts


FLOAT, PROMPT, BLOCKS, PATCH = 4, 5, TINY["num_layers"], 16 * 4


def run_loaded(case: Case, sent: dict[int, Counter]) -> None:
    """The case on its ranks, of which what they say to each other as they load is not counted."""

    def run(mesh: Mesh) -> None:
        pipelines = {}
        run_case(case, mesh, pipelines)
        sent[mesh.rank].clear()
        run_case(case, mesh, pipelines)

    run_as_threads(case.degrees, run)


def latent_of(tokens: int) -> tuple[int, ...]:
    return (1, 16, 1, 2, 2 * tokens)


@pytest.mark.parametrize("tokens", [16, 15])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_sequence_parallel_sends_the_known_minimum(kind, degree, tokens, sent):
    """Ulysses: of q, k, v and output, what other ranks need. Ring: keys and values, once to each other rank."""
    case = Case(latent=latent_of(tokens), cfg=1.0, steps=1, degrees={kind: degree})
    run_loaded(case, sent)
    lengths = even_lengths(tokens, degree)
    for rank, local in enumerate(lengths):
        if kind == "ulysses":
            others = WIDTH // degree * (degree - 1)
            moved = BLOCKS * (3 * local * others + (tokens - local) * WIDTH // degree)
        else:
            moved = BLOCKS * 2 * (tokens - lengths[(rank + 1) % degree]) * WIDTH
        assert sent[rank]["exchange"] == moved * FLOAT
        assert sent[rank]["gather"] == (degree - 1) * max(lengths) * PATCH * FLOAT
        assert not sent[rank]["reduce"]


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallel_sends_the_known_minimum(degree, sent):
    """Three sums of the tokens and four of their norms in each block, one of the text; the modulation once."""
    tokens = 16
    case = Case(latent=latent_of(tokens), cfg=1.0, steps=1, degrees={"tensor": degree})
    run_loaded(case, sent)
    summed = BLOCKS * (3 * tokens * WIDTH + 3 * tokens + PROMPT) + PROMPT * WIDTH
    for rank in range(degree):
        assert abs(sent[rank]["reduce"] - 2 * (degree - 1) * summed * FLOAT // degree) <= 8 * BLOCKS
        assert sent[rank]["gather"] == (degree - 1) * 6 * WIDTH // degree * FLOAT
        assert not sent[rank]["exchange"]


# An exchange that is missing shows ----------------------------------------------------------------------------------


def _own_again(sent: torch.Tensor, received: torch.Tensor, *, group: Any) -> Callable[[], None]:
    received.copy_(sent)
    return lambda: None


def _own_back(output: torch.Tensor, tensor: torch.Tensor, *sizes: Any, **options: Any) -> SimpleNamespace:
    output.copy_(tensor)
    return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("degrees", "module", "name", "without"),
    [
        ({"tensor": 2}, linear, "add_up", lambda tensor, group: tensor),
        ({"tensor": 2}, linear, "gather_features", lambda tensor, lengths, group: torch.cat([tensor] * 2, -1)),
        ({"tensor": 2}, linear, "mean_square", lambda x, width, group: x.pow(2).mean(-1, keepdim=True) + 0.1),
        ({"ring": 2}, ring, "pass_on", _own_again),
        ({"ulysses": 2}, ulysses.dist, "all_to_all_single", _own_back),
        ({"data": 2}, replicas, "gather_tokens", lambda part, lengths, group, dim: torch.cat([part] * 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_exchange_is_seen(degrees, module, name, without, monkeypatch):
    case = Case(latent=(2, 16, 1, 8, 8), cfg=1.0, degrees=degrees)
    [reference] = run_on_one([case])
    monkeypatch.setattr(module, name, without)
    for result in run_as_threads(degrees, lambda mesh: run_case(case, mesh, {})):
        assert relative_error(result, reference) > 1e-4


# The mesh, the data axis, the idle cfg axis -------------------------------------------------------------------------


def test_a_group_of_several_axes_counts_through_the_inner_one_first():
    def run(mesh: Mesh) -> list[int]:
        assert mesh.group("cfg", "ulysses") is mesh.group("cfg", "ulysses")
        assert mesh.group("ring", "ulysses") is mesh.group("ulysses") and mesh.group("ring") is None
        return dist.get_process_group_ranks(mesh.group("cfg", "ulysses"))

    found = run_as_threads({"cfg": 2, "ring": 1, "ulysses": 2, "tensor": 2}, run)
    assert found == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_each_replica_predicts_its_own_items(batch):
    x, embedding = torch.randn(batch, 4), torch.randn(batch, 2, 3)

    def run(mesh: Mesh) -> int:
        counts = []

        def predict(x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
            counts.append(len(x))
            return x * sigma + conditioning.embedding.sum((1, 2)).unsqueeze(1)

        result = Replicas(predict, mesh.group("data"))(x, torch.tensor(0.5), Conditioning(embedding=embedding))
        assert torch.equal(result, x * 0.5 + embedding.sum((1, 2)).unsqueeze(1))
        return sum(counts)

    assert run_as_threads({"data": 2}, run) == list(even_lengths(batch, 2))


def test_as_many_seeds_as_items_give_different_latents():
    case = Case(latent=(3, 16, 1, 8, 8), sampler="euler_ancestral", degrees={"data": 2})
    first, second, third = run_as_threads(case.degrees, lambda mesh: run_case(case, mesh, {}))[0]
    assert not torch.allclose(first, second) and not torch.allclose(second, third)


@pytest.mark.parametrize("cfg", [1.0, 5.0])
@pytest.mark.parametrize("degrees", [{"cfg": 2}, {"cfg": 2, "ulysses": 2}, {"cfg": 2, "ring": 2}], ids=str)
def test_the_cfg_axis_shares_the_tokens_while_there_is_one_branch(degrees, cfg, monkeypatch):
    seen, attend = [], Sequence.attend

    def recorded(self: Sequence, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(query.shape[1])
        return attend(self, query, *args, **options)

    monkeypatch.setattr(Sequence, "attend", recorded)

    def run(mesh: Mesh) -> None:
        pipeline = Pipeline.load(ModelSettings(model="random:wan"), mesh=mesh, progress=ignore_progress)
        pipelines = {("random:wan", "auto", tuple(degrees.items())): pipeline}
        run_case(Case(cfg=5.0, steps=1, degrees=degrees), mesh, pipelines)
        mesh.agree(0)
        if mesh.rank == 0:
            seen.clear()
        mesh.agree(0)
        run_case(Case(cfg=cfg, steps=1, degrees=degrees), mesh, pipelines)

    run_as_threads(degrees, run)
    ranks = 2 * degrees.get("ulysses", 1) * degrees.get("ring", 1)
    assert set(seen) == {16 // (ranks if cfg == 1.0 else ranks // 2)}
