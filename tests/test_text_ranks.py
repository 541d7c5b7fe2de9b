"""A text encoder cut over the tensor axis gives what the whole one gives, and each rank holds and reads its part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from runtime.encoders.reporting import GroupProgress
from runtime.encoders.text import TextEncoder
from runtime.errors import Cancelled
from runtime.families.texts import UMT5
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import ModelSettings
from runtime.text_files import TextPart, find_encoders
from runtime.tiny_shapes.text import build_tokenizer, vocabulary
from tests.processes import run_as_processes
from tests.ranks import run_as_threads

LIMIT = 1e-5
"""Largest difference, where the values are around 1."""
PROMPTS = ("a red circle on a white background, left", "", "a blue square " * 20)
HEADS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An encoder in several files, and its tokenizer."""
    path = tmp_path_factory.mktemp("text")
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=len(vocabulary()), d_model=64, d_kv=16, num_heads=HEADS, d_ff=96, num_layers=3, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = UMT5EncoderModel(config)
    for name, weight in model.named_parameters():
        wide = 0.5 if "bias" in name or "shared" in name else weight[0].numel() ** -0.5
        torch.nn.init.normal_(
            weight, std=wide / 4 if name.endswith(".q.weight") else wide
        )  # T5 does not scale its scores
    model.save_pretrained(path / "text_encoder", max_shard_size="100KB")
    assert len(list((path / "text_encoder").glob("*.safetensors"))) > 2
    build_tokenizer().save_pretrained(path / "tokenizer")
    return path


def load(folder: Path, mesh: Mesh) -> TextEncoder:
    file = find_encoders(folder / "text_encoder")["umt5xxl"]
    part = TextPart(replace(UMT5[0], length=32), file, folder / "tokenizer")
    return TextEncoder.load([part], dtype=torch.float32, device=mesh.device, group=mesh.group("tensor"))


def work_through(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """Every prompt on this rank, and how many numbers its part of the encoder has."""
    encoder = load(folder, mesh)
    results = {
        str(number): encoder.encode(prompt, progress=ignore_progress).embedding for number, prompt in enumerate(PROMPTS)
    }
    return results | {"numbers": torch.tensor(sum(weight.numel() for weight in encoder.model.parameters()))}


@pytest.fixture(scope="module")
def whole(folder) -> dict[str, torch.Tensor]:
    return work_through(Mesh.single(), folder)


@pytest.mark.parametrize("degree", [2, 3, HEADS + 1])
def test_the_ranks_together_give_what_the_whole_one_gives(folder, whole, degree):
    if degree == 2:
        ranks = run_as_processes("tests.test_text_ranks:work_through", {"tensor": degree}, folder)
    else:
        ranks = run_as_threads({"tensor": degree}, lambda mesh: work_through(mesh, folder))
    for result in ranks:
        for number in map(str, range(len(PROMPTS))):
            error = float((result[number] - whole[number]).abs().max())
            print(f"prompt {number}: largest difference {error:.1e}, deviation {float(whole[number].std()):.2f}")
            assert result[number].shape == whole[number].shape
            assert error < LIMIT
    everywhere = 64 * 7  # the norms of three layers, two each, and the last
    if degree > HEADS:
        everywhere += 3 * 32 * HEADS  # with more ranks than heads each has them all, and their biases of 32 buckets
    assert sum(int(result["numbers"]) - everywhere for result in ranks) == int(whole["numbers"]) - everywhere
    most = 0.53 if degree <= HEADS else 0.25  # of 4 heads 2 at most
    assert max(int(result["numbers"]) for result in ranks) < most * int(whole["numbers"])


def test_only_the_ranks_of_one_tensor_group_hold_an_encoder(folder):
    settings = ModelSettings(model="random:wan", text_encoder=str(folder / "text_encoder"))

    def work(mesh: Mesh) -> tuple[bool, torch.Tensor | None]:
        pipeline = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
        conditioning = pipeline.encode_text(PROMPTS[0], progress=ignore_progress)
        return pipeline._components.text_encoder is not None, conditioning and conditioning.embedding

    spread = run_as_threads({"cfg": 2, "tensor": 2}, work)
    assert [holds for holds, _ in spread] == [True, True, False, False]
    alone = run_as_threads({"cfg": 2}, work)
    assert [holds for holds, _ in alone] == [True, False]
    assert torch.allclose(spread[0][1], alone[0][1], atol=LIMIT)
    assert [embedding for _, embedding in spread[1:]] == [None] * 3


def test_cancel_on_the_first_rank_stops_the_others_at_the_same_block(folder, whole):
    def work(mesh: Mesh) -> tuple[list[int], torch.Tensor]:
        encoder, group, steps = load(folder, mesh), mesh.group("tensor"), []

        def progress(stage, step, total, *, preview=None, notice="", together=True) -> None:
            steps.append(step)
            if mesh.rank == 0 and step == 2:
                raise Cancelled

        with pytest.raises(Cancelled):
            encoder.encode(PROMPTS[0], progress=GroupProgress(progress, group))
        return steps, encoder.encode(PROMPTS[0], progress=ignore_progress).embedding

    results = run_as_threads({"tensor": 2}, work)
    assert [steps for steps, _ in results] == [[0, 1, 2]] * 2
    assert all(torch.allclose(embedding, whole["0"], atol=LIMIT) for _, embedding in results)
