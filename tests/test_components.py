"""Text encoder and VAE: where they are, when they are let go of, and what is remembered of prompts."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from runtime import release
from runtime.encoders.remembered import RememberedPrompts
from runtime.errors import Refused
from runtime.mesh import Mesh
from runtime.message import Conditioning
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.settings import MemorySettings, ModelSettings
from runtime.tiny_shapes import MODEL_FOLDER
from runtime.weighing import weigh
from tests.processes import run_as_processes

PLACES = ("auto", "device", "cpu", "on-demand")


def conditioning(numbers: int = 4) -> Conditioning:
    """Of so many float32 numbers."""
    return Conditioning(embedding=torch.zeros(1, 1, numbers))


def load(mesh: Mesh | None = None, *, prompts: RememberedPrompts | None = None, **memory: str) -> Pipeline:
    settings = ModelSettings(model="tiny-shapes", memory=MemorySettings(**memory))
    return Pipeline.load(settings, mesh=mesh or Mesh.single(), progress=ignore_progress, prompts=prompts)


def latent() -> torch.Tensor:
    return torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))


# Prompts ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_remembered_by_encoder_and_text():
    prompts, made = RememberedPrompts(1 << 20), conditioning()
    prompts.put("umt5", "red", made)
    assert prompts.get("umt5", "red") is made
    assert prompts.get("t5", "red") is None and prompts.get("umt5", "blue") is None


def test_the_prompts_used_last_are_remembered_up_to_the_limit():
    prompts = RememberedPrompts(3 * 16)
    for text in "abc":
        prompts.put("umt5", text, conditioning(4))
    assert prompts.get("umt5", "a") is not None and prompts.nbytes == 48
    prompts.put("umt5", "d", conditioning(4))
    assert [prompts.get("umt5", text) is not None for text in "abcd"] == [True, False, True, True]
    prompts.put("umt5", "long", conditioning(13))
    assert (
        prompts.get("umt5", "long") is None and prompts.nbytes == 48
    )  # what alone is over the limit pushes nothing out


def test_no_prompt_is_in_what_is_remembered():
    prompts = RememberedPrompts(1 << 20)
    prompts.put("umt5", "a secret", conditioning())
    assert prompts.nbytes and "secret" not in repr(vars(prompts))


def test_a_pipeline_recalls_prompts_of_one_that_is_gone_and_no_encoder_is_read():
    prompts = RememberedPrompts(1 << 26)
    expected = load(prompts=prompts).encode_text("a red circle", progress=ignore_progress)
    second = load(prompts=prompts)
    assert second.encode_text("a red circle", progress=ignore_progress) is expected
    assert second._components.text_encoder is None
    second.encode_text("a blue circle", progress=ignore_progress)
    assert second._components.text_encoder is not None


# Places -------------------------------------------------------------------------------------------------------------


def test_parts_are_changed_and_placed_otherwise_without_loading_the_transformer_again(tmp_path):
    pipeline = load()
    text, picture = (
        pipeline.encode_text("red", progress=ignore_progress),
        pipeline.decode(latent(), progress=ignore_progress),
    )
    transformer, components = pipeline.transformer, pipeline._components
    encoder, vae = components.text_encoder, components.autoencoder

    def use(**chosen: Any) -> None:
        pipeline.use_parts(ModelSettings(model="tiny-shapes", **chosen))

    use(vae=str(write_vae(tmp_path)))
    assert components.text_encoder is encoder and components.autoencoder is None
    assert not torch.equal(pipeline.decode(latent(), progress=ignore_progress), picture)
    with pytest.raises(Refused, match="no such VAE"):
        use(vae=str(tmp_path / "gone"))
    assert components.autoencoder is not None
    use(memory=MemorySettings(text_encoder_device="on-demand"))
    assert components.text_encoder is None and next(encoder.model.parameters()).is_meta
    assert torch.equal(pipeline.encode_text("red", progress=ignore_progress).embedding, text.embedding)
    assert torch.equal(pipeline.decode(latent(), progress=ignore_progress), picture)
    assert components.text_encoder is None and components.autoencoder is not vae and pipeline.transformer is transformer


def write_vae(folder: Path) -> Path:
    """That of tiny-shapes, other in its last bias."""
    shutil.copytree(MODEL_FOLDER / "vae", folder / "vae")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("conv_out.bias"))
    save_file(tensors | {name: tensors[name] + 0.5}, file)
    return folder / "vae"


def parts_of(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """Of a rank: the bytes that it asks room for by three prompts, two of them the same, and as many pictures; what its two
    parts take then; and whether every weight of its VAE is what the first rank makes of it.
    """
    asked, prompts = [], RememberedPrompts(0 if mesh.rank else 1 << 26)
    settings, place = (
        ModelSettings(model="tiny-shapes"),
        {"mesh": mesh, "progress": ignore_progress, "prompts": prompts},
    )
    pipeline = Pipeline.load(settings, make_room=lambda needed: asked.append(needed.host), **place)
    asked.clear()
    for text in ("red", "red", "blue"):
        pipeline.encode_text(text, progress=ignore_progress)
        pipeline.decode(latent(), progress=ignore_progress)
    encoder, vae = pipeline._components.text_encoder, pipeline._components.autoencoder.model
    held = [weigh([part]).host for part in (encoder.model if encoder else torch.nn.Module(), vae)]
    if mesh.world > 1:
        dist.barrier()
        for weight in vae.parameters() if mesh.rank == 0 else ():
            weight.data.fill_(7.0)
        dist.barrier()
    shared = all(bool((weight == 7.0).all()) for weight in vae.parameters())
    return {"asked": torch.tensor(asked), "held": torch.tensor(held), "shared": torch.tensor(shared)}


def test_room_is_asked_for_once_before_a_part_is_read_and_ranks_hold_a_vae_in_host_memory_once(tmp_path):
    alone = parts_of(Mesh.single(), tmp_path)
    assert alone["asked"].tolist() == alone["held"].tolist() and min(alone["held"]) > 1 << 20
    first, second = run_as_processes("tests.test_components:parts_of", {"cfg": 2}, tmp_path)
    encoder, vae = alone["held"].tolist()
    assert first["asked"].tolist() == [encoder, vae] and second["asked"].tolist() == [0, vae]
    assert first["shared"] and second["shared"] and second["held"][0] == 0


@pytest.mark.parametrize("place", PLACES)
def test_text_and_picture_are_the_same_wherever_encoder_and_vae_are(place):
    reference, moved = load(), load(text_encoder_device=place, vae_device=place)
    for pipeline in (reference, moved):
        pipeline.text = pipeline.encode_text("a red circle", progress=ignore_progress).embedding
        pipeline.picture = pipeline.decode(latent(), progress=ignore_progress)
    assert torch.equal(moved.text, reference.text) and torch.equal(moved.picture, reference.picture)
    components, stays = moved._components, place != "on-demand"
    assert (components.text_encoder is not None, components.autoencoder is not None) == (stays, stays)
    on_device = {"auto": ["vae"], "on-demand": []}.get(place, ["text encoder", "vae"])
    assert [part.kind for part in moved.parts] == on_device and {part.place for part in moved.parts} <= {place}


def test_what_is_read_on_demand_is_gone_when_memory_is_released(monkeypatch):
    pipeline, left, gone = load(text_encoder_device="on-demand", vae_device="on-demand"), [], []
    components = pipeline._components
    for name in ("_load_text_encoder", "_load_autoencoder"):
        read = getattr(components, name)
        monkeypatch.setattr(components, name, lambda *given, read=read: watched(read(*given), left))
    monkeypatch.setattr(release, "release_memory", lambda: gone.append(all(each() is None for each in left)))
    pipeline.encode_text("a red circle", progress=ignore_progress)
    pipeline.decode(latent(), progress=ignore_progress)
    assert left and gone == [True, True]


def watched(part: Any, left: list[weakref.ref]) -> Any:
    left += [weakref.ref(weight) for weight in part.model.parameters()]
    return part


def used_on_demand(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """What a rank holds after a use, and the picture on the first."""
    prompts = RememberedPrompts(0 if mesh.rank else 1 << 26)
    pipeline = load(mesh, prompts=prompts, text_encoder_device="on-demand", vae_device="on-demand")
    first, again = (pipeline.encode_text("a red circle", progress=ignore_progress) for _ in range(2))
    assert again is first and (first is None) == bool(mesh.rank)
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
