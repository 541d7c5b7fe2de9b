"""What ranks and server tell of themselves: what is loaded, and what it takes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .chosen_part import ChosenPart
from .message import Message
from .settings import ModelSettings
from .units import in_units


class HeldModel(Message):
    """A model that a rank has loaded, and what it takes of the device's memory and of the host's; `parts` beside the
    transformer stay on the device.
    """

    model: ModelSettings
    device_bytes: int = Field(ge=0)
    host_bytes: int = Field(ge=0)
    parts: tuple[ChosenPart, ...] = ()

    def __str__(self) -> str:
        name = self.model.model.rstrip("/").rsplit("/", 1)[-1]
        places = {"": self.device_bytes, " of host memory": self.host_bytes}
        sizes = " and ".join(f"{in_units(size)}{place}" for place, size in places.items() if size)
        return f"{name} {sizes or 'nothing'}"


class Memory(Message):
    """What a rank has loaded, the model used last at the end; the server keeps it. `prompt_bytes` is what encoded prompts
    take.
    """

    kind: Literal["memory"] = "memory"
    models: tuple[HeldModel, ...] = ()
    prompt_bytes: int = Field(default=0, ge=0)

    @property
    def sizes(self) -> list[dict[str, str | int]]:
        """The models by path, with what they take, as `--json` prints it."""
        return [
            {"model": held.model.model, "device_bytes": held.device_bytes, "host_bytes": held.host_bytes}
            for held in self.models
        ]


class RankReport(Message):
    """One rank as the server sees it; `resident_bytes` is what its process has in memory, shared pages too, 0 where that is
    not known.
    """

    rank: int
    pid: int
    device: str
    memory: Memory = Memory()
    resident_bytes: int = 0

    @property
    def models(self) -> str:
        """What it has loaded, in words."""
        return ", ".join(map(str, self.memory.models)) or "no model"


class Report(Message):
    """Answer to `Status` and `Free`. `devices` are those of the ranks; `room` is what the job that was asked for is still to
    take, by device, at least.
    """

    kind: Literal["report"] = "report"
    pid: int
    ranks: tuple[RankReport, ...] = ()
    devices: tuple[str, ...] = ()
    model: str = ""
    busy: str = ""
    room: dict[str, int] = {}

    @property
    def memory(self) -> str:
        """What each rank has loaded, in a line; ranks that have the same share it."""
        held = [rank.models for rank in self.ranks]
        if len(set(held)) > 1:
            return "; ".join(f"rank {rank.rank}: {rank.models}" for rank in self.ranks)
        where = f"each of {len(held)} ranks" if held[1:] else "memory"
        return f"{where}: {held[0]}" if held else ""

    def bytes_on(self, device: str) -> int:
        """What loaded models take on a device of the server's, or of host memory for "cpu"."""
        models = [model for rank in self.ranks if device in ("cpu", rank.device) for model in rank.memory.models]
        return sum(model.host_bytes if device == "cpu" else model.device_bytes for model in models)
