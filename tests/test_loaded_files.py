"""Files that change after something was read from them: noticed before a run, and during it, on every rank alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from runtime import loaded_files
from runtime.agreement import agree
from runtime.errors import Refused
from runtime.loaded_files import LoadedFiles
from runtime.mesh import Mesh
from runtime.offload.tensor_file import TensorFile
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.reading import WeightFile
from runtime.settings import LoraSettings, MemorySettings, ModelSettings
from runtime.tiny_shapes import MODEL_FOLDER
from tests.gguf_files import write_wan
from tests.lora_files import Draw, kohya
from tests.ranks import Case, relative_error, run_as_threads, run_on_one, sample_request
from tests.test_experts import write_expert
from tests.test_nunchaku_file import write_both
from tests.test_offload import case as case  # a fixture: a model of three layers in a folder

SAME = 2e-6
WAYS = {"none": {}} | {kind: {"offload": kind, "resident_blocks": "0"} for kind in ("layerwise", "disk")}
WEIGHTS = "diffusion_pytorch_model.safetensors"
of_wan = pytest.mark.parametrize("case", ["wan"], indirect=True)


def write_over(path: Path, content: bytes) -> None:
    """As a copy over a file does: it stays the same one."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def put_in_place(path: Path, content: bytes) -> None:
    """As a download does that is moved there in the end."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def write_in_secret(path: Path, content: bytes) -> None:
    """As a copy does that takes over the time of its source."""
    status = path.stat()
    time.sleep(0.05)  # the system's clock of changes is coarse
    write_over(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def create_again(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


CHANGES = {
    "written over": (lambda path: write_over(path, b"other"), True, "has been written to"),
    "longer": (lambda path: write_over(path, b"longer"), True, r"has been written to \(it had 5 bytes and has 6\)"),
    "put in place": (lambda path: put_in_place(path, b"other"), False, "has been replaced by another file"),
    "created again": (lambda path: create_again(path, b"other"), None, "has been"),
    "its time set back": (
        lambda path: write_in_secret(path, b"other"),
        False,
        "though its time of writing is the same",
    ),
    "gone": (Path.unlink, False, "cannot be found any more"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("folder", [False, True])
def test_what_became_of_a_file_is_told(name, folder, tmp_path):
    change, in_place, words = CHANGES[name]
    path = tmp_path / "model" / "part" / "file"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"first")
    os.utime(path, ns=(1, 1))
    files = LoadedFiles.of([path.parent.parent if folder else path])
    assert not files.changed and files == LoadedFiles.of([path])
    change(path)
    assert path.name in files.changed and files.changed.startswith(str(path)) and LoadedFiles.of([path]) != files
    assert re.search(words, files.changed)
    if in_place is not None:  # a file system may give a new file the number of the old one
        assert bool(files.overwritten) == in_place


def test_a_file_of_which_nothing_can_be_told_counts_as_changed_and_not_as_written_to(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"first")
    files = LoadedFiles.of([path])

    def refuse(file):
        raise PermissionError("not yours")

    monkeypatch.setattr(loaded_files.FileState, "of", refuse)
    assert files.changed.endswith("cannot be found any more") and not files.overwritten


def test_a_file_that_is_written_to_can_be_read_from_no_more(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(4)}, path)
    os.utime(path, ns=(1, 1))
    stored = TensorFile(path).get_slice("x")
    assert not stored[:].any()
    save_file({"x": torch.ones(4)}, tmp_path / "y.safetensors")
    write_over(path, (tmp_path / "y.safetensors").read_bytes())
    with pytest.raises(OSError, match=r"x\.safetensors has been written to since"):
        stored[:]


# The transformer ----------------------------------------------------------------------------------------------------


def copied(case: Case, folder: Path) -> tuple[Path, bytes]:
    """The model in a folder of its own; and a file of the same size with other weights for it."""
    for file in Path(case.model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    os.utime(folder / WEIGHTS, ns=(1, 1))
    save_file({name: tensor * 0.5 for name, tensor in load_file(folder / WEIGHTS).items()}, folder / "other")
    return folder / WEIGHTS, (folder / "other").read_bytes()


class Ending:
    """A progress at which all ranks end with what one of them met, and at whose first step of sampling one does something."""

    def __init__(self, mesh: Mesh, act) -> None:
        self._mesh, self._act = mesh, act

    def __call__(self, stage, step, total, *, failure=None, **others):
        if stage == "sampling" and step == 1 and self._act and self._mesh.rank == self._mesh.world - 1:
            self._act, act = None, self._act
            act()
        agree(self._mesh, stop=False, failure=failure)


def load(folder: Path, way: str, mesh: Mesh) -> Pipeline:
    settings = ModelSettings(model=str(folder), memory=MemorySettings(**WAYS[way]))
    return Pipeline.load(settings, mesh=mesh, progress=Ending(mesh, None))


@of_wan
@pytest.mark.parametrize("way", WAYS)
def test_a_file_written_over_during_a_run_ends_it_on_every_rank(way, case, tmp_path):
    path, other = copied(case, tmp_path)

    def run(mesh: Mesh) -> str:
        pipeline = load(tmp_path, way, mesh)
        assert not pipeline.changed
        dist.barrier()
        with pytest.raises(Refused, match=f"{WEIGHTS} has been written to.*queue the prompt again"):
            pipeline.sample(sample_request(case), progress=Ending(mesh, lambda: write_over(path, other)))
        return pipeline.changed

    told = run_as_threads({"ulysses": 2}, run)
    assert told[0] == told[1] and str(path) in told[0]


@of_wan
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_replaced_or_deleted_during_a_run_leaves_its_latent_right(way, case, tmp_path):
    path, other = copied(case, tmp_path)
    pipeline, one = load(tmp_path, way, Mesh.single()), Mesh.single()
    for act in (lambda: put_in_place(path, other), path.unlink):
        latent = pipeline.sample(sample_request(case), progress=Ending(one, act))
        assert relative_error(latent, run_on_one([case])[0]) < SAME and pipeline.changed


@of_wan
def test_what_was_converted_needs_its_file_no_more(case, tmp_path):
    path, other = copied(case, tmp_path)
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    pipeline = load(tmp_path, "none", Mesh.single())
    assert not pipeline.experts[0].reads_files and load(Path(case.model), "none", Mesh.single()).experts[0].reads_files
    act = Ending(Mesh.single(), lambda: write_over(path, other))
    assert pipeline.sample(sample_request(case), progress=act).isfinite().all() and pipeline.changed


@of_wan
def shards(folder: Path) -> tuple[Case, list[Path]]:
    """A model in two files."""
    weights = load_file(write_expert(folder / "whole", seed=1) / WEIGHTS)
    parts = {f"part-{number}.safetensors": list(weights)[number::2] for number in range(2)}
    for name, names in parts.items():
        save_file({each: weights[each] for each in names}, folder / name)
    index = {"weight_map": {each: name for name, names in parts.items() for each in names}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "whole" / "config.json", folder)
    return Case(model=str(folder), family="wan", steps=1), [folder / name for name in parts]


def blocks(folder: Path) -> tuple[Case, list[Path]]:
    """A GGUF file."""
    write_wan(folder / "wan.gguf", "Q8_0")
    return Case(model=str(folder / "wan.gguf"), family="wan", steps=1), [folder / "wan.gguf"]


def four_bits(folder: Path) -> tuple[Case, list[Path]]:
    """A file of Nunchaku's."""
    _, packed = write_both(folder)
    return Case(model=str(packed), family="flux", latent=(1, 16, 8, 8), steps=1), [packed]


@pytest.mark.parametrize("way", ["none", "disk"])
@pytest.mark.parametrize("written", [shards, blocks, four_bits])
def test_every_file_of_a_model_is_looked_at(written, way, tmp_path):
    case, paths = written(tmp_path)
    for path in paths:
        pipeline = load(Path(case.model), way, Mesh.single())
        os.utime(path)
        with pytest.raises(Refused, match=f"{path.name} has been written to.*queue the prompt again"):
            pipeline.sample(sample_request(case), progress=ignore_progress)
        assert path.name in pipeline.changed


def test_the_files_of_both_experts_are_looked_at(tmp_path):
    pair = [write_expert(tmp_path / name, seed=seed) for seed, name in enumerate(("high", "low"))]
    settings = ModelSettings(model=str(pair[0]), model_low_noise=str(pair[1]), boundary=0.9)
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    for folder in reversed(pair):
        os.utime(folder / WEIGHTS, ns=(1, 1))
        assert str(folder / WEIGHTS) in pipeline.changed


def test_a_file_replaced_while_it_is_read_is_refused_by_every_rank(case, tmp_path, monkeypatch):
    path, other = copied(case, tmp_path)
    read, left = WeightFile.part, [lambda: put_in_place(path, other)]

    def part(file, name, *others, **options):
        if dist.get_rank() == 1 and left:
            left.pop()()
        return read(file, name, *others, **options)

    monkeypatch.setattr(WeightFile, "part", part)

    def run(mesh: Mesh) -> int:
        with pytest.raises(Refused, match="has been replaced by another file, while it was being read"):
            load(tmp_path, "none", mesh)
        return mesh.least(1)

    assert run_as_threads({"ulysses": 2}, run) == [1, 1]


@of_wan
def test_no_block_is_left_from_one_run_to_the_next(case, tmp_path):
    pipeline = load(Path(case.model), "disk", Mesh.single())
    for progress in (ignore_progress, Ending(Mesh.single(), lambda: 1 / 0)):
        with suppress(ZeroDivisionError):
            pipeline.sample(sample_request(case), progress=progress)
        assert not pipeline.experts[0].runner._taken


# LoRAs, text encoder and VAE ----------------------------------------------------------------------------------------

LAYERS = {f"blocks.{number}.self_attn.q": (128, 128) for number in range(2)}


@pytest.mark.parametrize("write", [write_over, put_in_place])
def test_a_lora_written_anew_is_read_anew(write, tmp_path):
    path, pipeline = tmp_path / "lora.safetensors", _random()
    latents = []
    for seed in (1, 1, 2):
        save_file(kohya(LAYERS, Draw(seed)), tmp_path / "made")
        if seed == 2 or not path.exists():
            path.touch()
            write(path, (tmp_path / "made").read_bytes())
        pipeline.use_loras([LoraSettings(path=str(path))])
        latents.append(pipeline.sample(sample_request(Case(steps=1)), progress=ignore_progress))
    assert torch.equal(latents[0], latents[1]) and relative_error(latents[2], latents[0]) > 1e-2


def test_ranks_that_find_different_loras_all_refuse(tmp_path, monkeypatch):
    path = tmp_path / "lora.safetensors"
    save_file(kohya(LAYERS, Draw(1)), path)
    found = LoadedFiles.of([path])

    def run(mesh: Mesh) -> int:
        pipeline = _random(mesh)
        with pytest.raises(Refused, match="a LoRA file is just being written: queue the prompt again"):
            pipeline.use_loras([LoraSettings(path=str(path))])
        return mesh.least(1)

    monkeypatch.setattr(LoadedFiles, "of", lambda places: found if dist.get_rank() else LoadedFiles())
    assert run_as_threads({"ulysses": 2}, run) == [1, 1]


def _random(mesh: Mesh | None = None) -> Pipeline:
    return Pipeline.load(ModelSettings(model="random:wan"), mesh=mesh or Mesh.single(), progress=ignore_progress)


def complete(folder: Path) -> Pipeline:
    """A model with all of its parts, in a folder of its own."""
    shutil.copytree(MODEL_FOLDER, folder, dirs_exist_ok=True)
    return Pipeline.load(ModelSettings(model=str(folder)), mesh=Mesh.single(), progress=ignore_progress)


@pytest.mark.parametrize("write", [write_over, put_in_place])
def test_parts_whose_files_have_changed_are_read_anew_and_nothing_else(write, tmp_path):
    pipeline = complete(tmp_path)
    latent = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def results() -> list[torch.Tensor]:
        text = pipeline.encode_text("a red circle", progress=ignore_progress).embedding
        return [text, pipeline.decode(latent, progress=ignore_progress)]

    first, again = results(), results()
    assert all(map(torch.equal, first, again))
    for part in ("text_encoder", "vae"):
        path = next((tmp_path / part).glob("*.safetensors"))
        save_file({name: tensor * 0.9 for name, tensor in load_file(path).items()}, tmp_path / "made")
        write(path, (tmp_path / "made").read_bytes())
    fresh = Pipeline.load(ModelSettings(model=str(tmp_path)), mesh=Mesh.single(), progress=ignore_progress)
    anew = results()
    assert not any(map(torch.equal, anew, first)) and not pipeline.changed
    assert torch.equal(anew[0], fresh.encode_text("a red circle", progress=ignore_progress).embedding)
    assert torch.equal(anew[1], fresh.decode(latent, progress=ignore_progress))


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_a_part_written_over_while_it_is_used_gives_no_result(part, tmp_path):
    pipeline, path = complete(tmp_path), next((tmp_path / part).glob("*.safetensors"))

    def touch(stage, step, total, **others):
        if stage in ("decoding", "encoding text"):
            os.utime(path)

    with pytest.raises(Refused, match="has been written to, while it was being read"):
        if part == "vae":
            pipeline.decode(torch.zeros(1, 16, 1, 8, 8), progress=touch)
        else:
            pipeline.encode_text("a red circle", progress=touch)
