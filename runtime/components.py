"""Text encoder and VAE of a model: read when they are first needed, and after each use where the settings want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .agreement import agree, agree_in
from .chosen_part import TEXT_ENCODER, VAE, ChosenPart
from .encoders.remembered import RememberedPrompts
from .encoders.reporting import GroupProgress
from .encoders.rows import Rows
from .encoders.text_loras import for_text
from .encoders.vae import Autoencoder
from .encoders.vae_files import check_autoencoder, load_autoencoder
from .inspection import ModelFacts
from .loaded_files import LoadedFiles
from .mesh import Mesh
from .message import Conditioning
from .number_formats import AUTO_DTYPE
from .offload.host_copy import hold_once
from .part_sizes import text_bytes, vae_bytes
from .parts import text_parts_of, vae_of
from .progress import ReportProgress
from .protocol import LOADING
from .release import let_go, release_memory
from .settings import AUTO, AXES, LoraSettings, ModelSettings
from .text_files import TextPart
from .weighing import Bytes

if TYPE_CHECKING:
    from .encoders.text import TextEncoder

HOST = torch.device("cpu")


class Components:
    """The parts of one model beside its transformer. All ranks make the same calls with the same values."""

    def __init__(
        self,
        settings: ModelSettings,
        facts: ModelFacts,
        *,
        mesh: Mesh,
        prompts: RememberedPrompts | None = None,
        make_room: Callable[[Bytes], None] = lambda needed: None,
    ) -> None:
        self.text_encoder: TextEncoder | None = None
        self.autoencoder: Autoencoder | None = None
        self._settings, self._facts, self._family, self._mesh = settings, facts, facts.spec, mesh
        self._prompts, self._make_room = prompts or RememberedPrompts(0), make_room
        self._files: dict[str, LoadedFiles] = {}

    def encode_text(
        self, text: str, *, loras: Iterable[LoraSettings] = (), progress: ReportProgress
    ) -> Conditioning | None:
        """The conditioning of a prompt with the parts of these LoRAs that are for the encoder, told of in notices; None on
        every rank but the first. Raises `Refused` without a text encoder.
        """
        self._drop_changed()
        chosen = for_text(loras)
        # on every rank, so that all refuse alike and stay
        parts = text_parts_of(self._settings, self._facts)
        files = LoadedFiles.of(place for part in parts for place in part.places)
        encoder = (files.states, self._family.texts, self._text_device.type, chosen)
        remembered = self._prompts.get(encoder, text)
        is_done = not self._encodes or self._first_has(remembered)
        self._make_room_for(Bytes() if is_done or self.text_encoder is not None else self._text_bytes(parts))
        if is_done:
            return remembered
        report = GroupProgress(progress, self._mesh.group("tensor"))
        with self._text_encoder_of(parts, files, report) as model, self._unchanged(files, chosen):
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

    def use(self, settings: ModelSettings) -> None:
        """Read the parts as these settings say from now on, and let go of those that they choose or place otherwise."""
        before, self._settings = self._settings, settings
        if ChosenPart.of(TEXT_ENCODER, settings) != ChosenPart.of(TEXT_ENCODER, before):
            self._drop_text_encoder()
        if ChosenPart.of(VAE, settings) != ChosenPart.of(VAE, before):
            self._drop_autoencoder()

    @property
    def modules(self) -> list[nn.Module]:
        """The parts that have been read."""
        return [part.model for part in (self.text_encoder, self.autoencoder) if part is not None]

    @property
    def staying(self) -> tuple[ChosenPart, ...]:
        """The parts that have been read and stay where they run: a text encoder may wait elsewhere."""
        waits = self._settings.memory.text_encoder_device == AUTO
        read = {TEXT_ENCODER: self.text_encoder is not None and not waits, VAE: self.autoencoder is not None}
        return tuple(ChosenPart.of(kind, self._settings) for kind, stays in read.items() if stays)

    @contextmanager
    def vae(self, progress: ReportProgress) -> Iterator[Autoencoder]:
        """The VAE, for one use. Raises `Refused` when there is none, or when it has changed meanwhile."""
        self._drop_changed()
        if self.autoencoder is None:
            path = vae_of(self._settings, self._facts)
            check_autoencoder(path, self._family)
            self._make_room_for(Bytes.on(self._vae_device, vae_bytes(path)))
            self._files[VAE] = LoadedFiles.of([path])
            self.autoencoder = self._load_autoencoder(path, progress)
        try:
            yield self.autoencoder
            agree(self._mesh, stop=False, failure=self._files[VAE].check_read())
        finally:
            if self._settings.memory.vae_device == "on-demand":
                self._drop_autoencoder()

    def _drop_changed(self) -> None:
        """Let go of the parts when the files of one are no longer those that it was read from; all ranks call it together."""
        changed = [files.changed for files in self._files.values()]
        if self._mesh.largest(any(changed)):
            self._drop_text_encoder()
            self._drop_autoencoder()

    def _drop_text_encoder(self) -> None:
        if self.text_encoder is not None:
            let_go(self.text_encoder.model)
        self.text_encoder = None
        self._files.pop(TEXT_ENCODER, None)

    def _drop_autoencoder(self) -> None:
        if self.autoencoder is not None:
            let_go(self.autoencoder.model)
        self.autoencoder = None
        self._files.pop(VAE, None)

    @contextmanager
    def _text_encoder_of(
        self, parts: tuple[TextPart, ...], files: LoadedFiles, report: GroupProgress
    ) -> Iterator[TextEncoder]:
        if self.text_encoder is None:
            report(LOADING, 0, 1)
            self._files[TEXT_ENCODER] = files
            self.text_encoder = self._load_text_encoder(parts)
        try:
            yield self.text_encoder
        finally:
            if self._settings.memory.text_encoder_device == "on-demand":
                self._drop_text_encoder()

    @property
    def _text_device(self) -> torch.device:
        return HOST if self._settings.memory.text_encoder_device == "cpu" else self._mesh.device

    @property
    def _vae_device(self) -> torch.device:
        return HOST if self._settings.memory.vae_device == "cpu" else self._mesh.device

    @property
    def _encodes(self) -> bool:
        """Whether this rank has a share in encoding: those of the first tensor group have."""
        return not any(self._mesh.index(axis) for axis in AXES if axis != "tensor")

    def _text_bytes(self, parts: Iterable[TextPart]) -> Bytes:
        """What this rank's share of the text encoders takes, where they wait."""
        size = text_bytes(parts, AUTO_DTYPE[self._text_device.type].itemsize) // self._mesh.degree("tensor")
        waits = self._settings.memory.text_encoder_device == AUTO
        return Bytes.on(HOST if waits else self._text_device, size)

    def _make_room_for(self, part: Bytes) -> None:
        """Ask for room where a rank is to read a part; all ranks call it together."""
        if self._mesh.largest(part != Bytes()):
            self._make_room(part)

    @contextmanager
    def _unchanged(self, files: LoadedFiles, loras: Iterable[LoraSettings]) -> Iterator[None]:
        """Raise `Refused`, on each of the ranks that share the encoder, where a file is not what it was before its use."""
        others = LoadedFiles.of(lora.path for lora in loras)
        yield
        failure = files.check_read() or others.check_read()
        agree_in(self._mesh.group("tensor"), stop=False, failure=failure)

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

    def _load_autoencoder(self, path: Path, progress: ReportProgress) -> Autoencoder:
        progress(LOADING, 0, 1)
        model, ranks = load_autoencoder(path, self._family), self._mesh.group(*AXES)
        if self._vae_device == HOST:
            hold_once(model, ranks)
            release_memory()  # what each had for itself
        return Autoencoder(model, form=self._family.latent, rows=Rows(ranks), device=self._vae_device)
