"""Run the engine on several ranks: as real processes over gloo, or as threads of this process."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.families import FAMILIES
from runtime.families.spec import FamilySpec
from runtime.families.wan import WAN
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import LoraSettings, MemorySettings, ModelSettings, SampleSettings
from tests.processes import TIMEOUT_SECONDS, run_as_processes

REGIONS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "": {"positive": [{}], "negative": [{}]},
    "entries": {"positive": [{}, {"strength": 0.4}, {"end_percent": 0.4}], "negative": [{}]},
    "areas": {"positive": [{}, {"area": (4, 5, 1, 2)}, {"area": (1, 1, 0, 0)}], "negative": [{"area": (3, 4, 0, 0)}, {}]},
    "masks": {"positive": [{"mask": True}, {"mask": True, "area_from_mask": True}], "negative": [{}, {"mask": True}]},
    "turns": {"positive": [{"end_percent": 0.2}, {"start_percent": 0.2, "area": (3, 3, 1, 1)}, {"default": True}], "negative": [{"end_percent": 0.1}]},
}  # fmt: skip
"""Fields of each entry of both sides, by name; a mask is drawn."""

FIRST = ("wan", "flux", "flux-schnell", "flux-fill", "flux-control", "qwen")
"""Families for which every product of kinds is run each time; for the others in full."""
VIDEOS = ("wan-i2v", "wan2.2-i2v", "wan2.2-ti2v", "ltx", "ltx-0.9.5", "hunyuan-1.5")
"""Families of videos after the first, in `test_video_ranks`."""
TABLE = {
    "no mask": {"latent": (1, 16, 8, 8), "padded": False},
    "padded text": {"latent": (1, 16, 8, 8), "prompts": (6, 9)},
    "uneven tokens": {"latent": (1, 16, 5, 9), "prompts": (5, 8)},
    "batch 2": {"latent": (2, 16, 8, 8)},
}
"""What every family does along every kind and product of kinds."""


@dataclass(frozen=True)
class Case:
    """A request, and the degrees it runs with."""

    latent: tuple[int, ...] = (1, 16, 1, 8, 8)
    prompts: tuple[int, ...] = (5, 5)
    """Lengths of the positive and the negative prompt."""
    cfg: float = 5.0
    steps: int = 3
    sampler: str = "euler"
    scheduler: str = "simple"
    model: str = "random:wan"
    dtype: str = "auto"
    quant: str = "none"
    degrees: dict[str, int] = field(default_factory=dict)
    padded: bool = True
    """Whether a third of each prompt is padding: masked where the family reads a mask, zeros elsewhere."""
    regions: str = ""
    """Which of `REGIONS` the conditioning has."""
    family: str = ""
    """Of a model that is given by its path."""
    memory: dict[str, str] = field(default_factory=dict)
    loras: tuple[str, ...] = ()

    def __str__(self) -> str:
        degrees = " ".join(f"{axis}{degree}" for axis, degree in self.degrees.items())
        shape = "x".join(map(str, self.latent))
        model, prompts = self.model.removeprefix("random:"), f"prompts{self.prompts}"
        model += "" if self.quant == "none" else f" {self.quant}"
        settings = f"{self.sampler} {self.scheduler} {'' if self.padded else 'unpadded '}{self.regions}".rstrip()
        memory = " ".join(f"{name} {value}" for name, value in self.memory.items())
        lora = "lora" if self.loras else ""
        return f"{self.family or model} {degrees} {shape} cfg{self.cfg:g} {prompts} {settings} {memory} {lora}".rstrip()


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference."""
    return float((result - reference).norm() / reference.norm())


def family_case(family: str, **changes: Any) -> Case:
    """A small request of a family."""
    form = FAMILIES[family].latent
    latent = (1, form.channels, *([1] if form.dims == 3 else []), 8, 8)
    return Case(**{"model": f"random:{family}", "family": family, "latent": latent, "steps": 1, **changes})


def sample_request(case: Case) -> Sample:
    """The request of a case: the same in every process."""
    generator = torch.Generator().manual_seed(3)
    positive, negative = (
        tuple(entry(case, length, fields, generator) for fields in REGIONS[case.regions][side])
        for side, length in zip(("positive", "negative"), case.prompts, strict=True)
    )
    return Sample(
        job="test",
        model=ModelSettings(model=case.model, dtype=case.dtype, quant=case.quant),
        settings=SampleSettings(
            steps=case.steps, cfg=case.cfg, sampler_name=case.sampler, scheduler=case.scheduler, seed=7
        ),
        positive=positive,
        negative=negative,
        latent=torch.zeros(case.latent),
        noise_mask=noise_mask_of(case, generator),
    )


def noise_mask_of(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    """A mask of the picture; of its frames where the family is told the noise of each."""
    if family_of(case).levels:
        frames = case.latent[2] if len(case.latent) == 5 else 1
        return torch.linspace(0.5, 1.0, frames).view(1, 1, frames, 1, 1)
    return torch.rand(1, 1, 9, 7, generator=generator) if case.regions == "masks" else None


def family_of(case: Case) -> FamilySpec:
    """The family of the model of a case."""
    return FAMILIES.get(case.family or case.model.removeprefix("random:"), WAN)


def entry(case: Case, length: int, fields: dict[str, Any], generator: torch.Generator) -> Conditioning:
    """A drawn entry of conditioning, as the tiny model of the case takes it."""
    family = family_of(case)
    length = family.text_length if family.picture_tokens else length
    embedding = torch.randn(1, length, family.tiny[family.text_width], generator=generator)
    drawn = {"mask": torch.rand(1, 6, 6, generator=generator)} if "mask" in fields else {}
    if "area_from_mask" in fields:
        drawn["mask_spans"] = ((0, 6), (0, 6))
    if family.pooled_width:
        drawn |= {"pooled": torch.randn(1, family.tiny[family.pooled_width], generator=generator), "guidance": 4.0}
    if case.padded:
        kept = (torch.arange(length) < length - length // 3)[None]
        if reads_mask(family):
            drawn |= {"attention_mask": kept.long()}
        else:
            embedding = embedding * kept.unsqueeze(-1)
    drawn |= pictures(family, (1, *case.latent[1:]), generator)
    return Conditioning(embedding=embedding, **{**fields, **drawn})


def reads_mask(family: FamilySpec) -> bool:
    """Whether a family leaves out of a prompt what a mask says."""
    return not {"attention_mask", "word_mask"}.isdisjoint(dict(family.inputs).values())


def pictures(family: FamilySpec, latent: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What a family that makes videos of pictures reads of them: the first frame is given."""
    drawn = {}
    if "picture" in family.beside and family.latent.dims == 3:
        frames = 1 if len(latent) < 5 else latent[2]
        drawn["concat_latent"] = torch.randn(1, family.latent.channels, frames, *latent[-2:], generator=generator)
        drawn["concat_mask"] = (
            (torch.arange(frames) > 0).float().view(1, 1, frames, 1, 1).expand(1, 1, -1, *latent[-2:])
        )
    for source in {"clip_vision", "clip_vision_last"} & set(dict(family.inputs).values()):
        drawn[source] = torch.randn(1, 9, family.tiny[family.vision_width], generator=generator)
    if family.second_text_width:
        drawn["second_embedding"] = torch.randn(1, 3, family.tiny[family.second_text_width], generator=generator)
    return drawn


def run_case(case: Case, mesh: Mesh, pipelines: dict[Any, Pipeline]) -> torch.Tensor:
    """The latent of a case on this rank. Pipelines are kept in `pipelines`, one for each model and mesh."""
    key = (case.model, case.dtype, case.quant, *(tuple(each.items()) for each in (case.degrees, case.memory)))
    if key not in pipelines:
        kinds = {"dtype": case.dtype, "quant": case.quant, "memory": MemorySettings(**case.memory)}
        settings = ModelSettings(model=case.model, **kinds)
        pipelines[key] = Pipeline.load(settings, mesh=mesh, progress=ignore_progress)
    pipelines[key].use_loras([LoraSettings(path=path) for path in case.loras])
    return pipelines[key].sample(sample_request(case), progress=ignore_progress)


def run_on_one(cases: Sequence[Case]) -> list[torch.Tensor]:
    """The latents of the cases on one rank, whatever degrees they name."""
    pipelines: dict[Any, Pipeline] = {}
    return [run_case(Case(**{**asdict(case), "degrees": {}, "memory": {}}), Mesh.single(), pipelines) for case in cases]


def run_cases_as_processes(cases: Sequence[Case], folder: Path, *, kind: str = "cpu") -> list[list[torch.Tensor]]:
    """The latents of the cases (all of the same number of ranks) by case and rank, from real processes.

    Over gloo on the processor, over NCCL with a GPU for each rank when `kind` is "cuda".
    """
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    results = run_as_processes("tests.ranks:work_through", cases[0].degrees, folder, kind=kind)
    return [[result[str(number)] for result in results] for number in range(len(cases))]


def run_as_threads(degrees: dict[str, int], function: Callable[[Mesh], Any]) -> list[Any]:
    """What `function` gives on each rank of a mesh whose ranks are threads; all collectives but send and receive."""
    from torch.testing._internal.distributed import multi_threaded_pg

    world = math.prod(degrees.values())
    store, results, errors = dist.HashStore(), [None] * world, []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = function(Mesh.of_world(degrees, device="cpu"))
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results


def work_through(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """The latents of the folder's cases on this rank, by number."""
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    results, pipelines = {}, {}
    for number, (before, case) in enumerate(zip([cases[0], *cases], cases, strict=False)):
        if case.degrees != before.degrees:
            leave(mesh)
            mesh, pipelines = Mesh.of_world(case.degrees, device=mesh.device), {}
        results[str(number)] = run_case(case, mesh, pipelines)
    return results


def leave(mesh: Mesh) -> None:
    """Give up the groups of a mesh: those of gloo take time for as long as they live."""
    dist.barrier()
    for group in mesh._groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
