"""Text encoder and VAE of a model: read when they are first needed, and after each use where the settings want them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .encoders.remembered import RememberedPrompts
from .encoders.reporting import GroupProgress
from .encoders.rows import Rows
from .encoders.text_loras import for_text
from .encoders.vae import Autoencoder
from .encoders.vae_files import load_autoencoder
from .inspection import ModelFacts
from .mesh import Mesh
from .message import Conditioning
from .parts import text_parts_of, vae_of
from .progress import ReportProgress
from .protocol import LOADING
from .release import let_go
from .settings import AXES, LoraSettings, ModelSettings
from .text_files import TextPart

if TYPE_CHECKING:
    from .encoders.text import TextEncoder

AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""By kind of device. Text encoders always run in these: T5 overflows in fp16."""
HOST = torch.device("cpu")


class Components:
    """The parts of one model beside its transformer. All ranks make the same calls with the same values."""

    def __init__(
        self, settings: ModelSettings, facts: ModelFacts, *, mesh: Mesh, prompts: RememberedPrompts | None = None
    ) -> None:
        self.text_encoder: TextEncoder | None = None
        self.autoencoder: Autoencoder | None = None
        self._settings, self._facts, self._family, self._mesh = settings, facts, facts.spec, mesh
        self._prompts = prompts or RememberedPrompts(0)

    def encode_text(
        self, text: str, *, loras: Iterable[LoraSettings] = (), progress: ReportProgress
    ) -> Conditioning | None:
        """The conditioning of a prompt with the parts of these LoRAs that are for the encoder, told of in notices; None on
        every rank but the first. Raises `Refused` without a text encoder.
        """
        chosen = for_text(loras)
        # on every rank, so that all refuse alike and stay
        parts = text_parts_of(self._settings, self._facts)
        if any(self._mesh.index(axis) for axis in AXES if axis != "tensor"):
            return None
        report = GroupProgress(progress, self._mesh.group("tensor"))

        files = tuple(_file_states(*(place for part in parts for place in part.places)))
        encoder = (files, self._family.texts, self._text_device.type, chosen)
        remembered = self._prompts.get(encoder, text)
        if self._first_has(remembered):
            return remembered
        with self._text_encoder_of(parts, report) as model:
            for line in model.use_loras(chosen):
                report(LOADING, 1, 1, notice=line if self._mesh.rank == 0 else "")
            conditioning = model.encode(text, progress=report)
        if self._mesh.rank:
            return None
        self._prompts.put(encoder, text, conditioning)
        return conditioning

    def _first_has(self, remembered: Conditioning | None) -> bool:
        """Whether the first rank remembers it, on each of the ranks that share the encoder: it alone keeps what was made."""
        group, known = self._mesh.group("tensor"), torch.tensor([remembered is not None])
        if group is not None:
            dist.broadcast(known, src=0, group=group)
        return bool(known)

    @property
    def modules(self) -> list[nn.Module]:
        """The parts that have been read."""
        return [part.model for part in (self.text_encoder, self.autoencoder) if part is not None]

    @contextmanager
    def vae(self, progress: ReportProgress) -> Iterator[Autoencoder]:
        """The VAE, for one use. Raises `Refused` when there is none."""
        if self.autoencoder is None:
            self.autoencoder = self._load_autoencoder(progress)
        try:
            yield self.autoencoder
        finally:
            if self._settings.memory.vae_device == "on-demand":
                let_go(self.autoencoder.model)
                self.autoencoder = None

    @contextmanager
    def _text_encoder_of(self, parts: tuple[TextPart, ...], report: GroupProgress) -> Iterator[TextEncoder]:
        if self.text_encoder is None:
            report(LOADING, 0, 1)
            self.text_encoder = self._load_text_encoder(parts)
        try:
            yield self.text_encoder
        finally:
            if self._settings.memory.text_encoder_device == "on-demand":
                let_go(self.text_encoder.model)
                self.text_encoder = None

    @property
    def _text_device(self) -> torch.device:
        return HOST if self._settings.memory.text_encoder_device == "cpu" else self._mesh.device

    def _load_text_encoder(self, parts: tuple[TextPart, ...]) -> TextEncoder:
        from .encoders.text import TextEncoder  # transformers: not before it is needed

        device = self._text_device
        return TextEncoder.load(
            parts,
            dtype=AUTO_DTYPE[device.type],
            device=device,
            stays=self._settings.memory.text_encoder_device != "auto",
            group=self._mesh.group("tensor"),
        )

    def _load_autoencoder(self, progress: ReportProgress) -> Autoencoder:
        path = vae_of(self._settings, self._facts)
        progress(LOADING, 0, 1)
        model, rows = load_autoencoder(path, self._family), Rows(self._mesh.group(*AXES))
        device = HOST if self._settings.memory.vae_device == "cpu" else self._mesh.device
        return Autoencoder(model, form=self._family.latent, rows=rows, device=device)


def _file_states(*places: Path) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of some files, and of every file in some folders: what changes when one of them is replaced."""
    for path in sorted({path for place in places for path in ([place] if place.is_file() else place.iterdir())}):
        state = path.stat()
        yield str(path), state.st_size, state.st_mtime_ns
