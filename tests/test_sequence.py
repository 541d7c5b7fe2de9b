"""The exchanges are exact for any lengths, and diffusers still has the seam they hang on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from torch import nn

from runtime.checkpoint import build_transformer
from runtime.diffusers_seam import WITHOUT_DISPATCH, backend_named, route_attention
from runtime.families import FAMILIES
from runtime.guidance import Denoiser, Entry
from runtime.inspection import inspect_model
from runtime.linear import local_part, swap_linears
from runtime.mesh import Mesh
from runtime.parallel.attention import attention
from runtime.parallel.shares import even_lengths
from runtime.parallel.ulysses import gather_tokens, heads_to_tokens, tokens_to_heads
from runtime.protocol import Conditioning
from runtime.sequence import Sequence, split_tokens
from runtime.tokens import pad_to_patch
from tests.ranks import run_as_threads


@pytest.mark.parametrize("heads", [8, 5])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 4), (1, 0), (3, 2, 2), (3, 3, 2, 2), (1, 1, 1, 0)])
def test_exchanges_move_every_token_and_head_to_its_place(lengths, heads):
    total, dealt = sum(lengths), even_lengths(heads, len(lengths))
    full = torch.randn(3, 2, total, heads, 16)

    def run(mesh: Mesh) -> None:
        group, rank = mesh.group("ulysses"), mesh.rank
        start = sum(lengths[:rank])
        local = full[:, :, start : start + lengths[rank]]
        shares = {"lengths": lengths, "heads": dealt, "group": group}
        some_heads = tokens_to_heads(*local, **shares)
        for exchanged, expected in zip(some_heads, full.split(dealt, dim=3)[rank], strict=True):
            assert torch.equal(exchanged, expected)
        for exchanged, expected in zip(some_heads, local, strict=True):
            assert torch.equal(heads_to_tokens(exchanged, **shares), expected)
        assert torch.equal(gather_tokens(local, lengths=lengths, group=group, dim=2), full)

    run_as_threads({"ulysses": len(lengths)}, run)


def test_lengths_differ_by_at_most_one():
    for total in range(40):
        for degree in range(1, 9):
            lengths = even_lengths(total, degree)
            assert len(lengths) == degree and sum(lengths) == total
            assert max(lengths) - min(lengths) <= 1


def test_a_mesh_puts_neighbouring_ranks_on_the_innermost_axis():
    degrees = {"data": 1, "cfg": 2, "ring": 1, "ulysses": 2, "tensor": 1}

    def run(mesh: Mesh) -> tuple:
        members = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in ("cfg", "ulysses")}
        return members, mesh.index("cfg"), mesh.index("ulysses"), mesh.group("ring"), mesh.agree(10 + mesh.rank)

    assert run_as_threads(degrees, run) == [
        ({"cfg": [0, 2], "ulysses": [0, 1]}, 0, 0, None, 10),
        ({"cfg": [1, 3], "ulysses": [0, 1]}, 0, 1, None, 10),
        ({"cfg": [0, 2], "ulysses": [2, 3]}, 1, 0, None, 10),
        ({"cfg": [1, 3], "ulysses": [2, 3]}, 1, 1, None, 10),
    ]


# The seam of diffusers ----------------------------------------------------------------------------------------------


class Recorder:
    """An exchange that changes nothing and counts."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def attend(self, query, key, value, *, mask, scale):
        self.shapes.append(tuple(query.shape))
        if mask is not None and mask.ndim == 2:  # of the text, which a `Sequence` would withhold
            mask = F.pad(mask, (query.shape[1] - mask.shape[1], 0), value=True)[:, None, None]
        return attention(query, key, value, mask=mask, scale=scale)


def tiny(family, **changed) -> nn.Module:
    return getattr(diffusers, family.transformer_class)(**family.tiny | changed).eval()


def inputs_of(family, text: int = 5) -> dict[str, Any]:
    """What the class takes for a latent of 2 x 4 tokens."""
    latent = torch.randn(1, family.tiny["in_channels"], *[1] * (family.latent.dims - 2 or family.listed), 4, 8)
    text = family.text_length if family.picture_tokens else text
    sources = {
        "embedding": torch.randn(1, text, family.tiny[family.text_width]),
        **dict.fromkeys(("attention_mask", "word_mask"), torch.tensor([[True, True, False, True, False]])),
        **dict.fromkeys(("video_places", "causal_video_places"), torch.rand(1, 3, 8)),
        **dict.fromkeys(
            ("clip_vision", "clip_vision_last"), torch.randn(1, 9, family.tiny.get(family.vision_width, 1))
        ),
        "second_embedding": torch.randn(1, 3, family.tiny.get(family.second_text_width, 1)),
        "second_mask": torch.ones(1, 3, dtype=torch.bool),
        "pooled": torch.randn(1, family.tiny.get(family.pooled_width, 1)),
        "guidance": torch.tensor([3.5]),
        "image_ids": torch.randint(3, (8, 3)).float(),
        "image_places": torch.randint(3, (8, 4)).float(),
        "text_ids": torch.zeros(text, 3),
        "text_places": torch.randint(3, (text, 4)).float(),
        "image_shapes": [[(1, 2, 4)]],
        "whole_mask": torch.ones(1, text, dtype=torch.bool),
    }
    inputs = {
        family.latent_input: torch.randn(1, 8, family.tiny["in_channels"]) if family.packed else latent,
        **{argument: sources[source] for argument, source in family.inputs},
    }
    if family.listed:
        inputs = {argument: list(each) for argument, each in inputs.items()}
    return {**inputs, family.time_input: torch.tensor([0.5 * family.timestep_scale])}


TOKENS = {"zimage": {"image": 32, "text": 32}, "hunyuan-1.5": {"image": 32, "text": 5 + 3 + 9}}
"""Of `inputs_of` by stream, where there are others than 8, and those of the prompt."""


REPLICATED = {"hunyuan-1.5": {"context_embedder.token_refiner.refiner_blocks.0.attn"}}
"""Attentions outside of the blocks, for which every rank has all tokens."""


def attentions_of(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "processor")}


def output_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """What a class answers; of lists, the first item."""
    return model(**inputs, return_dict=False)[0][0]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@torch.inference_mode()
def test_the_attention_over_split_tokens_and_nothing_else_comes_to_us(family):
    model, inputs, recorder = tiny(family), inputs_of(family), Recorder()
    reference = output_of(model, inputs)
    attentions = {name for name in attentions_of(model) if family.in_block(name)}
    assert {name for name in attentions_of(model) if name not in attentions} == REPLICATED.get(family.name, set())
    ours = {name for name in attentions if re.fullmatch(family.self_attention, name)}
    for name in ours:
        route_attention(model.get_submodule(name), recorder)
    assert torch.equal(output_of(model, inputs), reference)
    has_text = any(place.stream == "text" for place in family.split.split)
    counts = TOKENS.get(family.name, {"image": 8, "text": 5 * has_text})
    streams = [next((each for own, each in family.split.alone if re.fullmatch(own, name)), "") for name in ours]
    tokens = [counts.get(stream, sum(counts.values())) for stream in streams]
    heads = (family.tiny[family.heads], family.head_dim_of(family.tiny))
    assert sorted(recorder.shapes) == sorted((1, count, *heads) for count in tokens)
    assert {name.rpartition(".")[0] for name in attentions} == {name.rpartition(".")[0] for name in ours}
    assert len({name.rpartition(".")[0] for name in ours}) == sum(
        len(model.get_submodule(blocks)) for blocks in family.blocks
    )


@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@torch.inference_mode()
def test_a_split_model_equals_the_bare_class(family, heads):
    """One forward with everything split at once: text, image, heads and weights. Of five heads, the ranks of a ring have
    2, 1, 1 and 1.
    """
    head_dim = family.head_dim_of(family.tiny)
    keys = (family.width, "caption_projection_dim", "added_kv_proj_dim", "cross_attention_dim")
    all_heads = heads * family.tensor.together
    changed = {family.heads: all_heads, **{key: all_heads * head_dim for key in keys if key in family.tiny}}
    changed |= {"num_kv_heads": heads} if "num_kv_heads" in family.tiny else {}
    model, inputs = tiny(family, **changed), inputs_of(family)
    facts = inspect_model(f"random:{family.name}")
    facts = replace(facts, heads=all_heads, config={**facts.config, **changed})
    weights, reference = model.state_dict(), output_of(model, inputs)

    def run(mesh: Mesh) -> None:
        model, _ = build_transformer(facts)
        swap_linears(model, family.tensor, head_dim=head_dim, group=mesh.group("tensor"))
        for name, tensor in weights.items():
            part = local_part(model, name)
            if part is not None:
                part.module.load_state_dict({part.leaf: part.cut.take(tensor)}, strict=False, assign=True)
        sequence = Sequence(mesh, heads=2, joined=family.split.joined)
        split_tokens(model, family.split, self_attention=family.self_attention, sequence=sequence)
        output = output_of(model, inputs)
        assert float((output - reference).norm() / reference.norm()) < 2e-6

    run_as_threads({"ring": 2, "ulysses": 2, "tensor": 2}, run)


def test_the_dispatcher_still_takes_what_we_hand_it():
    registry = attention_dispatch._AttentionBackendRegistry
    assert isinstance(registry._backends, dict)
    for family in FAMILIES.values():
        model = tiny(family)
        processors = [model.get_submodule(name).processor for name in attentions_of(model) if family.in_block(name)]
        assert processors
        for processor in processors:
            if type(processor).__name__ in WITHOUT_DISPATCH:
                continue
            assert processor._attention_backend is None and processor._parallel_config is None


def test_other_models_of_the_process_keep_their_attention():
    family = FAMILIES["wan"]
    route_attention(tiny(family).get_submodule("blocks.0.attn1"), Recorder())
    assert attention_dispatch._AttentionBackendRegistry.get_active_backend()[0].value == "native"
    assert tiny(family).get_submodule("blocks.0.attn1").processor._parallel_config is None


def test_a_backend_that_another_thread_has_half_added_is_not_taken_for_one(monkeypatch):
    registry = attention_dispatch._AttentionBackendRegistry
    for table in ("_backends", "_constraints", "_supported_arg_names"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    entry = backend_named("half", lambda query: query)
    del registry._supported_arg_names[entry]
    assert registry._supported_arg_names[backend_named("half", lambda query: query)] == {"query"}


def test_a_module_without_the_seam_is_an_error():
    with pytest.raises(RuntimeError, match="cannot be run over several ranks"):
        route_attention(nn.Linear(2, 2), Recorder())


def test_a_pattern_that_fits_no_attention_is_an_error():
    family = FAMILIES["wan"]

    def run(mesh: Mesh) -> None:
        with pytest.raises(RuntimeError, match="no module"):
            split_tokens(tiny(family), family.split, self_attention="nothing", sequence=Sequence(mesh, heads=4))

    run_as_threads({"ulysses": 2}, run)


# Guidance and prediction --------------------------------------------------------------------------------------------


def entry(value: float, length: int = 2) -> Entry:
    return Entry(Conditioning(embedding=torch.full((1, length, 3), value)))


def predict(x: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
    """A stand-in for a model: each item moves by the mean of its own prompt."""
    assert len(conditioning.embedding) == len(x)
    return x * sigma + conditioning.embedding.mean((1, 2)).view(-1, 1)


X, SIGMA = torch.arange(6.0).view(3, 2), torch.tensor(0.5)


@pytest.mark.parametrize("negative_length", [2, 5])
def test_guidance_moves_away_from_the_negative_branch(negative_length):
    denoise = Denoiser(predict, [[entry(1.0)], [entry(3.0, negative_length)]], scales=[4.0], batch=3)
    assert torch.allclose(denoise(X, SIGMA), X * 0.5 + 3.0 + (1.0 - 3.0) * 4.0)


@pytest.mark.parametrize(("negative", "cfg"), [([entry(3.0)], 1.0), ([], 4.0)])
def test_without_guidance_only_the_positive_branch_is_evaluated(negative, cfg):
    calls = []

    def counted(*args) -> torch.Tensor:
        calls.append(len(args[0]))
        return predict(*args)

    denoise = Denoiser(counted, [[entry(1.0)], negative], scales=[cfg], batch=3)
    assert torch.equal(denoise(X, SIGMA), X * 0.5 + 1.0)
    assert calls == [3]


def test_several_prompts_of_a_branch_are_averaged():
    denoise = Denoiser(predict, [[entry(1.0), entry(2.0, 4)], [entry(0.0)]], scales=[2.0], batch=3)
    assert torch.allclose(denoise(X, SIGMA), X * 0.5 + 2 * 1.5)


def test_prompts_are_dealt_to_the_batch_in_turn():
    pair = Conditioning(embedding=torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 2, 3))
    denoise = Denoiser(predict, [[Entry(pair)], []], scales=[1.0], batch=3)
    assert torch.allclose(denoise(X, SIGMA), X * 0.5 + torch.tensor([1.0, 2.0, 1.0]).view(3, 1))


def test_each_group_of_the_cfg_axis_evaluates_one_branch():
    def run(mesh: Mesh) -> tuple[torch.Tensor, int]:
        calls = []

        def counted(x, sigma, conditioning) -> torch.Tensor:
            calls.append(len(x))
            return predict(x, sigma, conditioning)

        denoise = Denoiser(counted, [[entry(1.0)], [entry(3.0, 7)]], scales=[4.0], batch=3, group=mesh.group("cfg"))
        return denoise(X, SIGMA), calls

    for result, calls in run_as_threads({"cfg": 2}, run):
        assert torch.allclose(result, X * 0.5 - 5.0) and calls == [3]


@pytest.mark.parametrize(("middle_scale", "asked"), [(2.0, 3), (1.0, 2)])
def test_each_branch_moves_away_from_the_next(middle_scale, asked):
    """As in ComfyUI's DualCFGGuider; a last branch that its scale leaves without effect is not evaluated."""
    calls = []

    def counted(x, sigma, conditioning) -> torch.Tensor:
        calls.append(len(x))
        return predict(x, sigma, conditioning)

    branches = [[entry(1.0)], [entry(3.0)], [entry(7.0)]]
    denoise = Denoiser(counted, branches, scales=[4.0, middle_scale], batch=3)
    moved = 7.0 + (3.0 - 7.0) * middle_scale + (1.0 - 3.0) * 4.0
    assert torch.allclose(denoise(X, SIGMA), X * 0.5 + moved) and sum(calls) == asked * 3


@pytest.mark.parametrize(("degree", "branches"), [(2, [2, 1]), (3, [1, 1, 1])])
def test_ranks_of_the_cfg_axis_share_any_number_of_branches(degree, branches):
    def run(mesh: Mesh) -> tuple[torch.Tensor, int]:
        calls = []

        def counted(x, sigma, conditioning) -> torch.Tensor:
            calls.append(len(x))
            return predict(x, sigma, conditioning)

        prompts = [[entry(1.0)], [entry(3.0, 7)], [entry(7.0)]]
        denoise = Denoiser(counted, prompts, scales=[4.0, 2.0], batch=3, group=mesh.group("cfg"))
        return denoise(X, SIGMA), sum(calls)

    found = run_as_threads({"cfg": degree}, run)
    assert [count for _, count in found] == [3 * branch for branch in branches]
    for result, _ in found:
        assert torch.allclose(result, X * 0.5 + 7.0 - 8.0 - 8.0)


def test_odd_sides_are_filled_from_the_other_end():
    latent = torch.arange(15.0).view(1, 1, 1, 3, 5)
    padded = pad_to_patch(latent, (1, 2, 2))
    assert padded.shape == (1, 1, 1, 4, 6)
    assert torch.equal(padded[..., 3, :], padded[..., 0, :]) and torch.equal(padded[..., 5], padded[..., 0])
    assert pad_to_patch(padded, (1, 2, 2)) is padded
