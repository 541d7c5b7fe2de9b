"""The sides of `bench parallel` on one rank: `python -m runtime.bench.parallel_sides FOLDER RANKS TASK ... RANK`.

TASK is `time ROUNDS` (each side in turn, on two ranks) or `memory SIDE` (one side alone, in a fresh process).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from ..checkpoint import random_tensors
from ..families.flux import FLUX
from ..mesh import Mesh
from ..parallel.shares import even_lengths
from ..pipeline import Pipeline
from ..prediction import pack
from ..progress import ignore_progress
from ..protocol import Conditioning, Sample
from ..settings import ModelSettings, SampleSettings
from ..weight_files import WEIGHTS
from .diffusers_parallel import share_tokens
from .sent_bytes import SentBytes
from .sides import resident_bytes, say, tell

FLOAT = 4
CFG = 5.0


@dataclass(frozen=True)
class Size:
    """A Flux-like transformer, and the picture it makes: rows and columns of patches."""

    heads: int = 12
    head_dim: int = 64
    double_blocks: int = 4
    single_blocks: int = 8
    rows: int = 32
    columns: int = 64
    text: int = 256
    text_width: int = 1024
    pooled_width: int = 256

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the class."""
        first = self.head_dim // 8
        return {
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": self.double_blocks,
            "num_single_layers": self.single_blocks,
            "attention_head_dim": self.head_dim,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_width,
            "pooled_projection_dim": self.pooled_width,
            "guidance_embeds": True,
            "axes_dims_rope": (first, (self.head_dim - first) // 2, (self.head_dim - first) // 2),
        }


TINY_SIZE = Size(
    text_width=FLUX.tiny["joint_attention_dim"],
    pooled_width=FLUX.tiny["pooled_projection_dim"],
    rows=4,
    columns=4,
    text=4,
)
"""A picture for the tiny model of the family."""


@dataclass(frozen=True)
class Side:
    """One way to run a step: ours along `degrees`, or diffusers' own."""

    name: str
    degrees: Mapping[str, int] = field(default_factory=dict)
    cfg: float = 1.0
    diffusers: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks it runs on."""
        return 2 if self.degrees else 1


SIDES = (
    Side("one_rank"),
    Side("ulysses2", {"ulysses": 2}),
    Side("ring2", {"ring": 2}),
    Side("tensor2", {"tensor": 2}),
    Side("diffusers", diffusers=True),
    Side("diffusers_ulysses2", {"ulysses": 2}, diffusers=True),
    Side("diffusers_ring2", {"ring": 2}, diffusers=True),
    Side("one_rank_cfg", cfg=CFG),
    Side("cfg2", {"cfg": 2}, cfg=CFG),
)


# The model and the request ------------------------------------------------------------------------------------------


def write_model(folder: Path, size: Size) -> None:
    """A transformer folder of diffusers, with random weights."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in _bare_class(size).state_dict().items()}
    save_file(dict(random_tensors(shapes)), folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"_class_name": FLUX.transformer_class, **size.config}))


def _bare_class(size: Size) -> torch.nn.Module:
    return getattr(diffusers, FLUX.transformer_class)(**size.config).eval().requires_grad_(False)


def _request(folder: Path, size: Size, cfg: float) -> Sample:
    """One step from noise, guided where `cfg` is not 1."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Conditioning(
            embedding=torch.randn(1, size.text, size.text_width, generator=generator),
            pooled=torch.randn(1, size.pooled_width, generator=generator),
        )
        for _ in range(2)
    ]
    return Sample(
        job="bench",
        model=ModelSettings(model=str(folder)),
        settings=SampleSettings(steps=1, cfg=cfg),
        positive=(prompts[0],),
        negative=(prompts[1],),
        latent=torch.zeros(1, FLUX.latent.channels, 2 * size.rows, 2 * size.columns),
    )


def sent_at_least(size: Size) -> dict[str, int]:
    """The bytes that the rank which sends most cannot do without in a step on two ranks, by side."""
    image, text = size.rows * size.columns, size.text
    tokens = image + text
    local = [sum(even_lengths(stream, 2)[rank] for stream in (image, text)) for rank in range(2)]
    heads = even_lengths(size.heads, 2)
    blocks = size.double_blocks + size.single_blocks
    gathered = even_lengths(image, 2)[0] * 64  # the prediction, 64 numbers for each patch
    exchanged = [
        3 * local[rank] * heads[1 - rank] * size.head_dim + local[1 - rank] * heads[rank] * size.head_dim
        for rank in range(2)
    ]
    summed = (2 * size.double_blocks + size.single_blocks) * tokens * size.width
    modulation = (12 * size.double_blocks + 3 * size.single_blocks + 2) * size.width // 2
    embedded = 3 * size.width + text * size.width // 2  # time, guidance and pooled prompt; and the prompt
    latent = FLUX.latent.channels * 4 * image
    numbers = {
        "ulysses2": blocks * max(exchanged) + gathered,
        "ring2": blocks * 2 * max(local) * size.width + gathered,
        "tensor2": summed + modulation + embedded,
        "cfg2": latent,
    }
    return {name: FLOAT * count for name, count in numbers.items()}


# One rank -----------------------------------------------------------------------------------------------------------


class Rank:
    """One rank of the bench, which has met the others."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._size = Size(**json.loads((folder / "size.json").read_text()))
        store = f"file://{folder / 'store'}"
        Mesh.join({"ulysses": ranks}, rank=rank, device="cpu", init_method=store)

    def time(self, rounds: int) -> dict[str, Any]:
        """Seconds of each round by side, once all are warm, and what a step of ours sends."""
        steps = {side.name: self._step(side) for side in SIDES if side.degrees or self._rank == 0}
        seconds: dict[str, list[float]] = {side.name: [] for side in SIDES}
        sent = {side.name: self._sent(steps[side.name]) for side in SIDES if side.degrees and not side.diffusers}
        for number in range(rounds + 1):
            for side in SIDES[:: 1 - 2 * (number % 2)]:  # back and forth, so that no side always follows the same
                seconds[side.name].append(self._seconds(steps.get(side.name)))
            if self._rank == 0:
                last = ", ".join(f"{name} {times[-1]:.2f}" for name, times in seconds.items())
                say(f"{f'round {number} of {rounds}' if number else 'to warm up'}, seconds: {last}")
        return {"seconds": {name: times[1:] for name, times in seconds.items()}, "sent": sent}

    def memory(self, name: str) -> dict[str, Any]:
        """What is resident before the model is loaded, and the most until its first step is done.

        A tiny model goes before it, so that what is loaded once for any model (code, the pools of libraries) is not counted.
        """
        side = next(side for side in SIDES if side.name == name)
        mesh = _mesh(side)
        tiny = Pipeline.load(ModelSettings(model="random:flux"), mesh=mesh, progress=ignore_progress)
        tiny.sample(_request(self._folder, TINY_SIZE, side.cfg), progress=ignore_progress)
        del tiny
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident_bytes("VmRSS")
        self._step(side)()
        return {"before": before, "peak": resident_bytes("VmHWM")}

    def _step(self, side: Side) -> Callable[[], object]:
        if side.diffusers:
            return self._step_of_diffusers(next(iter(side.degrees), ""))
        mesh = _mesh(side)
        request = _request(self._folder, self._size, side.cfg)
        pipeline = Pipeline.load(request.model, mesh=mesh, progress=ignore_progress)
        return lambda: pipeline.sample(request, progress=ignore_progress)

    def _step_of_diffusers(self, kind: str) -> Callable[[], object]:
        """A step of the bare class, or of it with diffusers' own parallelism of that kind."""
        size, request = self._size, _request(self._folder, self._size, 1.0)
        with torch.device("meta"):
            model = _bare_class(size)
        model.load_state_dict(load_file(self._folder / WEIGHTS), assign=True)
        model.pos_embed = type(model.pos_embed)(theta=10000, axes_dim=size.config["axes_dims_rope"])
        if kind:
            share_tokens(model, kind)
        latent, prompt = torch.randn(request.latent.shape), request.positive[0]
        inputs = {
            "hidden_states": pack(latent, FLUX.patch),
            "encoder_hidden_states": prompt.embedding,
            "pooled_projections": prompt.pooled,
            "timestep": torch.ones(1),
            "guidance": torch.tensor([3.5]),
            "img_ids": torch.cartesian_prod(*(torch.arange(float(count)) for count in (1, size.rows, size.columns))),
            "txt_ids": torch.zeros(size.text, 3),
        }
        return lambda: model(**inputs, return_dict=False)

    def _sent(self, step: Callable[[], object]) -> int:
        with SentBytes(rank=self._rank, degree=self._ranks) as sent:
            step()
        return sent.total

    def _seconds(self, step: Callable[[], object] | None) -> float:
        """From when all ranks begin until all have ended; a rank without a step sleeps meanwhile."""
        dist.barrier()
        began = time.perf_counter()
        if step is not None:
            with torch.inference_mode():
                step()
        dist.barrier()
        return time.perf_counter() - began


def _mesh(side: Side) -> Mesh:
    return Mesh.of_world(side.degrees, device="cpu") if side.degrees else Mesh.single()


def main(folder: str, ranks: str, task: str, *given: str) -> None:
    """Do the task, and print what came of it as one line of JSON."""
    torch.set_num_threads(1)
    *arguments, rank = given
    mine = Rank(Path(folder), int(rank), int(ranks))
    found = mine.time(int(arguments[0])) if task == "time" else mine.memory(arguments[0])
    tell(found)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
