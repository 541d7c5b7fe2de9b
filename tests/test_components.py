"""Text encoder and VAE: where they are, when they are let go of, and what is remembered of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.encoders.remembered import RememberedPrompts
from runtime.mesh import Mesh
from runtime.message import Conditioning
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import MemorySettings, ModelSettings
from tests.processes import run_as_processes

PLACES = ("auto", "device", "cpu", "on-demand")


class Counted:
    """Makes conditioning of `numbers` float32 numbers, and counts how often it did."""

    def __init__(self, numbers: int = 4) -> None:
        self.numbers, self.calls = numbers, 0

    def __call__(self) -> Conditioning:
        self.calls += 1
        return Conditioning(embedding=torch.full((1, 1, self.numbers), float(self.calls)))


def load(mesh: Mesh | None = None, *, prompts: RememberedPrompts | None = None, **memory: str) -> Pipeline:
    settings = ModelSettings(model="tiny-shapes", memory=MemorySettings(**memory))
    return Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress, prompts=prompts)


def latent() -> torch.Tensor:
    return torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))


# Prompts ------------------------------------------------------------------------------------------------------------


def test_a_prompt_asked_for_again_is_not_encoded_again_and_another_encoder_has_its_own():
    prompts, encode = RememberedPrompts(1 << 20), Counted()
    first, again = (prompts.recall("umt5", "red", encode) for _ in range(2))
    assert again is first and encode.calls == 1
    assert prompts.recall("t5", "red", encode) is not first and prompts.recall("umt5", "blue", encode) is not first
    assert encode.calls == 3


def test_the_prompts_used_last_are_remembered_up_to_the_limit():
    prompts, encode = RememberedPrompts(3 * 16), Counted(4)
    for text in ("a", "b", "c", "a", "d"):
        prompts.recall("umt5", text, encode)
    assert prompts.nbytes == 48 and encode.calls == 4
    for text, calls in (("a", 4), ("c", 4), ("d", 4), ("b", 5)):
        prompts.recall("umt5", text, encode)
        assert encode.calls == calls, text
    prompts.recall("umt5", "long", Counted(13))
    assert prompts.nbytes == 48  # what alone is over the limit pushes nothing out


def test_no_prompt_is_in_what_is_remembered():
    prompts = RememberedPrompts(1 << 20)
    prompts.recall("umt5", "a secret", Counted())
    assert "secret" not in repr(vars(prompts))


def test_a_rank_that_keeps_no_results_remembers_and_forgets_as_the_one_that_does():
    kept, other = RememberedPrompts(32), RememberedPrompts(32, keep=False)
    calls = []
    for prompts in (kept, other):
        encode = Counted()
        for text in ("a", "b", "a", "c", "b", "a"):
            prompts.recall("umt5", text, encode)
        calls.append(encode.calls)
    assert calls == [5, 5] and kept.nbytes == other.nbytes == 32
    assert other.recall("umt5", "a", Counted()) is None


def test_a_pipeline_recalls_prompts_of_one_that_is_gone_and_no_encoder_is_read():
    prompts = RememberedPrompts(1 << 26)
    expected = load(prompts=prompts).encode_text("a red circle", progress=ignore_progress)
    second = load(prompts=prompts)
    assert second.encode_text("a red circle", progress=ignore_progress) is expected
    assert second._components.text_encoder is None
    second.encode_text("a blue circle", progress=ignore_progress)
    assert second._components.text_encoder is not None


# Places -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_text_and_picture_are_the_same_wherever_encoder_and_vae_are(place):
    reference, moved = load(), load(text_encoder_device=place, vae_device=place)
    for pipeline in (reference, moved):
        pipeline.text = pipeline.encode_text("a red circle", progress=ignore_progress).embedding
        pipeline.picture = pipeline.decode(latent(), progress=ignore_progress)
    assert torch.equal(moved.text, reference.text) and torch.equal(moved.picture, reference.picture)
    components, stays = moved._components, place != "on-demand"
    assert (components.text_encoder is not None, components.autoencoder is not None) == (stays, stays)


def used_on_demand(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """What a rank holds after a use, and the picture on the first."""
    pipeline = load(mesh, text_encoder_device="on-demand", vae_device="on-demand")
    pipeline.encode_text("a red circle", progress=ignore_progress)
    picture = pipeline.decode(latent(), progress=ignore_progress)
    held = [pipeline._components.text_encoder, pipeline._components.autoencoder]
    return {"held": torch.tensor([each is not None for each in held])} | (
        {} if picture is None else {"picture": picture}
    )


def test_on_demand_holds_nothing_on_any_rank_after_a_use(tmp_path):
    results = run_as_processes("tests.test_components:used_on_demand", {"tensor": 2}, tmp_path)
    assert not any(result["held"].any() for result in results)
    alone = load().decode(latent(), progress=ignore_progress)
    assert torch.allclose(results[0]["picture"], alone, atol=1e-5)
