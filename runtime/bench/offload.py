"""A model that is larger than the memory it may use: from its file, under a hard limit, beside the same one resident.

Weights come in for nothing where computing a block takes longer than reading it. How many tokens that needs depends on the
machine, so both are timed first, and the fewest are chosen that do.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F

from ..families.wan import WAN
from ..folders import PrivateFolder, temporary_base
from ..mesh import Mesh
from ..offload.tensor_file import TensorFile
from ..pipeline import Pipeline
from ..progress import ignore_progress
from ..protocol import Conditioning, Sample
from ..settings import MemorySettings, ModelSettings, SampleSettings
from ..units import in_units
from .memory_limit import limited_group, put_into
from .sides import needs_proc, resident_bytes, run_sides, tell

MODULE = "runtime.bench.offload"
LIMIT_BYTES = 1 << 30
ROUNDS = 3
FROM_DISK = {"offload": "disk", "resident_blocks": "0", "prefetch": "1"}
WEIGHTS = "diffusion_pytorch_model.safetensors"
SIDES = (16, 24, 32, 48, 64, 96)
"""Of latents, of which each 2 x 2 make a token."""
AMPLE = 4.0
"""So many times as long as reading a block its Linears have to take."""


@dataclass(frozen=True)
class Size:
    """A Wan of 2.5 GB in float32, and a request; without a latent the one that fits the machine."""

    width: int = 1536
    feed_forward: int = 6144
    layers: int = 16
    latent: tuple[int, ...] = ()
    text_tokens: int = 64

    @property
    def tokens(self) -> int:
        """Of the latent."""
        return math.prod(self.latent[2:]) // 4

    @property
    def block_bytes(self) -> int:
        """What the Linears of a block take."""
        return 4 * (8 * self.width**2 + 2 * self.width * self.feed_forward)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the class."""
        heads = self.width // 128
        sizes = {"num_attention_heads": heads, "attention_head_dim": 128, "ffn_dim": self.feed_forward}
        return {**WAN.tiny, **sizes, "num_layers": self.layers, "text_dim": 256, "freq_dim": 256}


def measure(*, size: Size = Size(), rounds: int = ROUNDS, limit: int = LIMIT_BYTES) -> dict[str, Any]:
    """Seconds of a step resident and from the file, and the peak of resident memory under the limit.

    `is_limited` tells whether the system let us set the limit, which counts the pages of the file as well.
    `base_rss_bytes` is what the process takes before it knows of a model (torch and diffusers), `slot_bytes` the two
    blocks that are in memory at a time. Raises `Refused` where there is no /proc.
    """
    needs_proc("offload")
    with PrivateFolder(temporary_base()) as folder:
        model_bytes = write_model(folder, size)
        reading = _reading_seconds(folder / WEIGHTS, size)
        size = size if size.latent else _fitting(size, reading)
        task = {"size": asdict(size), "rounds": rounds, "folder": str(folder)}
        [resident] = run_sides(MODULE, [[json.dumps({**task, "memory": {}})]])
        with limited_group(limit) as group:
            join = {} if group is None else {"began": partial(put_into, group)}
            [streamed] = run_sides(MODULE, [[json.dumps({**task, "memory": FROM_DISK})]], **join)
    return {
        "resident_step_seconds": resident["step_seconds"],
        "offload_step_seconds": streamed["step_seconds"],
        "peak_rss_bytes": streamed["peak_bytes"],
        "base_rss_bytes": streamed["base_bytes"],
        "resident_peak_rss_bytes": resident["peak_bytes"],
        "slot_bytes": 2 * size.block_bytes,
        "limit_bytes": limit,
        "is_limited": group is not None,
        "model_bytes": model_bytes,
        "tokens": size.tokens,
        "block_seconds": resident["step_seconds"] / size.layers,
        "block_read_seconds": reading,
    }


def described(figures: dict[str, Any]) -> str:
    """The figures for a reader."""
    sizes = {name: in_units(value) for name, value in figures.items() if name.endswith("bytes")}
    limit = f"under a limit of {sizes['limit_bytes']}" if figures["is_limited"] else "(no limit could be set here)"
    ratio = figures["offload_step_seconds"] / figures["resident_step_seconds"]
    longer = "longer" if figures["block_seconds"] > figures["block_read_seconds"] else "NOT longer"
    return (
        f"A model of {sizes['model_bytes']} {limit}, from its file:\n"
        f"  a step takes {figures['offload_step_seconds']:.2f} s, resident {figures['resident_step_seconds']:.2f} s: "
        f"{ratio:.3f} times\n"
        f"  computing a block of {figures['tokens']} tokens takes {figures['block_seconds']:.3f} s, {longer} than reading "
        f"it from the system's cache: {figures['block_read_seconds']:.3f} s\n"
        f"  peak of resident memory {sizes['peak_rss_bytes']}, of which {sizes['base_rss_bytes']} before loading and "
        f"{sizes['slot_bytes']} for two blocks; resident {sizes['resident_peak_rss_bytes']}"
    )


def write_model(folder: Path, size: Size) -> int:
    """Save a model with small numbers, the same in each block; the bytes of its file."""
    with torch.device("meta"):
        model = getattr(diffusers, WAN.transformer_class)(**size.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    (folder / "config.json").write_text(json.dumps({"_class_name": WAN.transformer_class, **size.config}))
    path = folder / WEIGHTS
    _write_file(path, shapes)
    return path.stat().st_size


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """By hand, since the file is larger than what this process should hold. Tensors of a shape have the same numbers: to draw
    them takes longer than to write them.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    drawn = {shape: torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) for shape in set(shapes.values())}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(memoryview(drawn[shape].view(-1).view(torch.uint8).numpy()))


def _reading_seconds(path: Path, size: Size) -> float:
    """How long it takes to read the bytes of a block, which have just been written or read."""
    buffer = torch.empty(size.block_bytes, dtype=torch.uint8)
    with TensorFile(path) as file:
        return _median_seconds(lambda: file.read_into(buffer, 0))


def _fitting(size: Size, reading: float) -> Size:
    """With the smallest picture of which a block takes amply longer to compute than to read; else with the largest."""
    latents = [(1, 16, 1, side, side) for side in SIDES]
    sizes = [replace(size, latent=latent) for latent in latents]
    return next((each for each in sizes if _computing_seconds(each) > AMPLE * reading), sizes[-1])


def _computing_seconds(size: Size) -> float:
    """How long the Linears of a block take on one thread, by one of them."""
    x, weight = torch.randn(size.tokens, size.width), torch.randn(size.feed_forward, size.width)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _median_seconds(lambda: F.linear(x, weight)) * size.block_bytes / weight.nbytes
    finally:
        torch.set_num_threads(threads)


def _median_seconds(run: Callable[[], object]) -> float:
    """Of three runs, after one that does not count."""
    times = [time.perf_counter()]
    for _ in range(4):
        run()
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(times[1:]))


def _side(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    size, base = Size(**task["size"]), resident_bytes("VmRSS")
    settings = ModelSettings(model=task["folder"], dtype="fp32", memory=MemorySettings(**task["memory"]))
    pipeline = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
    marks = _Marks()
    pipeline.sample(request_of(settings, size, steps=task["rounds"] + 1), progress=marks)
    return {"step_seconds": marks.median(), "base_bytes": base, "peak_bytes": resident_bytes("VmHWM")}


class _Marks:
    """Progress that notes when each step ended; the first step is warm-up."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}

    def __call__(self, stage: str, step: int, total: int, **others: Any) -> None:
        self._times.setdefault(step, time.perf_counter())

    def median(self) -> float:
        """Seconds of a step, without the first."""
        times = [at for step, at in sorted(self._times.items()) if step]
        return statistics.median(after - before for before, after in pairwise(times))


def request_of(settings: ModelSettings, size: Size, *, steps: int) -> Sample:
    """A picture of the bench's size from a prompt of zeros."""
    prompt = Conditioning(embedding=torch.zeros(1, size.text_tokens, size.config["text_dim"]))
    widgets = SampleSettings(steps=steps, cfg=1.0)
    return Sample(
        job="bench", model=settings, settings=widgets, positive=(prompt,), latent=torch.zeros(tuple(size.latent))
    )


def main(arguments: Sequence[str]) -> None:
    """One side, in this process."""
    tell(_side(json.loads(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
