"""Models that take turns in a real sidecar, with LoRAs on, off and at other strengths: memory stays flat."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.client import Sidecar
from runtime.protocol import Conditioning, Decode, EncodeText, Sample
from runtime.settings import LoraSettings, ModelSettings, ParallelSettings, SampleSettings
from runtime.tiny_shapes.export import export_comfy_transformer
from tests.lora_files import Draw, kohya
from tests.sidecars import family_of, folders_of, never, rank_pids, run, steps_of
from tests.test_loaded_files import write_over

STRENGTHS = (1.0, 0.0, -0.5, 2.0)
WARM_ROUNDS = 3
FLAT = 0.02
"""How much resident memory may grow after the first rounds."""


@dataclass(frozen=True)
class Footprint:
    """What all processes of a sidecar take: memory, open files, and segments of shared memory."""

    resident: int
    files: int
    segments: int

    @classmethod
    def of(cls, sidecar: Sidecar) -> Footprint:
        processes: list[psutil.Process] = family_of(sidecar)
        return cls(
            sum(process.memory_info().rss for process in processes),
            sum(process.num_fds() for process in processes),
            len(list(folders_of(sidecar)[-1].iterdir())),
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSettings, ModelSettings, ModelSettings]:
    """A model with text encoder and VAE, another from a single file, and the pair of that and a third as two experts."""
    folder = tmp_path_factory.mktemp("models")
    first, second, lora = folder / "first.safetensors", folder / "second.safetensors", folder / "style.safetensors"
    export_comfy_transformer(first)
    save_file({name: tensor * 1.01 for name, tensor in load_file(first).items()}, second)
    save_file(kohya({f"blocks.{block}.self_attn.q": (256, 256) for block in range(2)}, Draw(1)), lora)
    pair = ModelSettings(model=str(first), model_low_noise=str(second), boundary=0.9)
    return ModelSettings(model="tiny-shapes"), ModelSettings(model=str(first)), pair


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sidecar]:
    """Starts sidecars that keep so much."""
    started: list[Sidecar] = []

    def start(keep: str) -> Sidecar:
        monkeypatch.setenv("OUTRIGGER_KEEP_HOST", keep)
        started.append(Sidecar.start(log=lambda line: None))
        return started[-1]

    yield start
    for each in started:
        each.close()


def with_lora(model: ModelSettings, strength: float, folder: Path) -> ModelSettings:
    """The model with the LoRA at a strength, on one rank of the processor; 0 is without."""
    loras = (LoraSettings(path=str(folder / "style.safetensors"), strength=strength),) if strength else ()
    return model.model_copy(update={"loras": loras, "parallel": ParallelSettings(devices="cpu:1")})


def ask(sidecar: Sidecar, kind: type, model: ModelSettings, **fields: object) -> tuple[bool, object]:
    """Whether a request loaded anything, and its result."""
    events = run(sidecar, kind(job=uuid.uuid4().hex, model=model, **fields), interrupted=never)
    return bool(steps_of(events, "loading")), events[-1]


def sampled(sidecar: Sidecar, model: ModelSettings, text: Conditioning) -> tuple[bool, torch.Tensor]:
    """Whether sampling loaded anything, and the latent of three steps, which for a pair need both experts."""
    fields = {"settings": SampleSettings(steps=3, cfg=1.0), "positive": (text,), "latent": torch.zeros(1, 16, 1, 8, 8)}
    loaded, result = ask(sidecar, Sample, model, **fields)
    return loaded, result.latent


def rounds(sidecar: Sidecar, models: tuple[ModelSettings, ...], count: int) -> tuple[list[Footprint], list[int]]:
    """The footprint and the number of loads after each of so many rounds of A -> B -> A and the pair."""
    complete, single, pair = models
    folder, prints, loads = Path(single.model).parent, [], []
    for number, strength in zip(range(count), itertools.cycle(STRENGTHS), strict=False):
        place = with_lora(complete, 0.0, folder)
        text = ask(sidecar, EncodeText, place, text=f"a red circle {number % WARM_ROUNDS}")[1].conditioning
        turns = [with_lora(each, strength, folder) for each in (complete, single, complete, pair)]
        results = [sampled(sidecar, turn, text) for turn in turns]
        assert torch.equal(results[0][1], results[2][1])
        ask(sidecar, Decode, place, latent=results[0][1])
        prints.append(Footprint.of(sidecar))
        loads.append(sum(loaded for loaded, _ in results))
    return prints, loads


def check_flat(prints: list[Footprint]) -> None:
    """What is taken after the first rounds is taken at the end, within 2 %; files and segments are as many."""
    warm, last = prints[WARM_ROUNDS - 1], prints[-1]
    growth = last.resident / warm.resident - 1
    print(f"{warm} after round {WARM_ROUNDS}, {last} after round {len(prints)}: {100 * growth:+.2f} %")
    assert growth < FLAT
    assert (last.files, last.segments) == (warm.files, warm.segments)


def test_a_model_written_over_between_prompts_or_during_one_is_read_anew_on_every_rank(sidecar, models, tmp_path):
    _, single, pair = models
    path, other = tmp_path / "model.safetensors", Path(pair.model_low_noise)
    shutil.copy(single.model, path)
    model = ModelSettings(model=str(path), parallel=ParallelSettings(devices="cpu:2", ulysses=2))
    running, text = sidecar("auto"), Conditioning(embedding=torch.ones(1, 4, 4096))
    fields = {"settings": SampleSettings(steps=200), "positive": (text,), "latent": torch.zeros(1, 16, 1, 8, 8)}
    first = sampled(running, model, text)
    assert [sampled(running, model, text)[0], first[0]] == [False, True]
    ranks = rank_pids(running)
    write_over(path, other.read_bytes())  # of the same size
    loaded, anew = sampled(running, model, text)
    assert loaded and not torch.equal(anew, first[1])
    with pytest.raises(ValueError, match="has been written to, while the model ran from it"):
        for event in running.call(Sample(job=uuid.uuid4().hex, model=model, **fields), interrupted=never):
            if steps_of([event]) == [1]:
                write_over(path, Path(single.model).read_bytes())
    assert torch.equal(sampled(running, model, text)[1], first[1]) and rank_pids(running) == ranks


@pytest.mark.parametrize(
    ("keep", "count"),
    [
        pytest.param("auto", 5, id="all fit"),
        pytest.param("auto", 20, marks=pytest.mark.full, id="all fit, long"),
        pytest.param("0", 20, marks=pytest.mark.full, id="one at a time, long"),
    ],
)
def test_models_that_take_turns_leave_memory_flat(sidecar, models, keep, count):
    prints, loads = rounds(sidecar(keep), models, count)
    check_flat(prints)
    assert loads[1:] == ([0] if keep == "auto" else [3]) * (count - 1)  # with one at a time: B, A and the pair
