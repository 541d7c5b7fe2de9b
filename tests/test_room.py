"""The room that ComfyUI is asked for before a job: by device, what the job is still to load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.asked_room import room_for
from runtime.chosen_part import TEXT_ENCODER, VAE, ChosenPart
from runtime.errors import Refused
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.plan import Plan
from runtime.progress import ignore_progress
from runtime.protocol import HeldModel
from runtime.settings import MemorySettings, ModelSettings
from runtime.weighing import weigh

GPUS = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
TRANSFORMER = 7 << 20
PLAN = Plan(data=1, cfg=2, ring=1, ulysses=1, tensor=2, devices=GPUS, bytes_per_rank=TRANSFORMER)


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """What text encoder and VAE of tiny-shapes take on a GPU, by those that were read; on the processor both are float32."""
    components = Pipeline.load(settings_of("device"), mesh=Mesh.single(), progress=ignore_progress)._components
    components.encode_text("red", progress=ignore_progress)
    with components.vae(ignore_progress) as vae:
        return {TEXT_ENCODER: weigh([components.text_encoder.model]).host // 2, VAE: weigh([vae.model]).host}


def settings_of(place: str, **others: str) -> ModelSettings:
    memory = MemorySettings(text_encoder_device=place, vae_device=place)
    return ModelSettings(model="tiny-shapes", memory=memory, **others)


def held(*parts: ChosenPart) -> list[HeldModel]:
    """The model on every GPU, with these parts."""
    return [HeldModel(model=settings_of("auto").weights, device_bytes=1, host_bytes=0, parts=parts)]


def room(model: ModelSettings, kind: str | None, loaded: list[HeldModel], plan: Plan = PLAN) -> dict[str, int]:
    return room_for(model, kind, loaded=loaded, find_plan=lambda: plan)


@pytest.mark.parametrize("place", ["auto", "device", "on-demand"])
def test_a_part_counts_on_the_gpus_that_read_it_and_beside_the_transformer_where_that_is_to_come(sizes, place):
    model, text, vae = settings_of(place), sizes[TEXT_ENCODER] // 2, sizes[VAE]
    assert room(model, TEXT_ENCODER, held()) == {"cuda:0": text, "cuda:1": text}  # shared by the first tensor group
    assert room(model, VAE, held()) == dict.fromkeys(GPUS, vae)
    assert room(model, VAE, []) == dict.fromkeys(GPUS, TRANSFORMER + vae)
    both = [TRANSFORMER + text] * 2 + [TRANSFORMER] * 2
    assert room(model, TEXT_ENCODER, []) == dict(zip(GPUS, both, strict=True))
    assert room(model, None, []) == dict.fromkeys(GPUS, TRANSFORMER)


def test_nothing_is_asked_for_what_runs_on_the_processor_or_is_there(sizes):
    unasked = {"loaded": held(), "find_plan": lambda: pytest.fail("planned for nothing")}
    model = settings_of("device")
    for kind in (TEXT_ENCODER, VAE):
        assert room_for(settings_of("cpu"), kind, **unasked) == {}
        there = held(ChosenPart.of(kind, model))
        assert room_for(model, kind, **unasked | {"loaded": there}) == {}
    assert room_for(model, None, **unasked) == {}
    on_cpu = replace(PLAN, devices=("cpu",) * 4)
    assert room(model, VAE, held(), on_cpu) == {} and room(model, VAE, [], on_cpu) == {"cpu": TRANSFORMER}


def test_a_part_that_was_read_from_elsewhere_or_for_another_place_is_still_to_come(sizes):
    model = settings_of("device")
    for other in (settings_of("auto"), settings_of("device", vae="/m/other.safetensors")):
        assert room(model, VAE, held(ChosenPart.of(VAE, other))) == dict.fromkeys(GPUS, sizes[VAE])


def test_what_is_refused_asks_for_what_comes_before_it():
    def refused() -> Plan:
        raise Refused("5 GPUs")

    missing = settings_of("auto", vae="/m/none.safetensors")
    assert room(missing, VAE, []) == dict.fromkeys(GPUS, TRANSFORMER)
    assert room_for(missing, VAE, loaded=[], find_plan=refused) == {}
