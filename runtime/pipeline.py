"""A loaded model on one rank: text, sampling and decoding, without sockets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from .checkpoint import STAGE as LOADING
from .checkpoint import build_transformer, fill_transformer
from .conditions import ConditioningReader
from .encoders.reporting import GroupProgress
from .encoders.rows import Rows
from .encoders.text import TextEncoder
from .encoders.vae import Autoencoder
from .encoders.vae_files import load_autoencoder
from .errors import Refused
from .guidance import Denoiser, Entry
from .inspection import ModelFacts, inspect_model
from .linear import hold_hooks, swap_linears
from .lora.apply import Loras
from .mesh import Mesh
from .prediction import Predictor, check_positions
from .previews import Draw, previewer
from .progress import ReportProgress
from .protocol import Conditioning, Sample
from .regions import pair_areas, resolve_region
from .replicas import Replicas
from .sample_inputs import flow_table, noise_of, sigmas_of
from .sampling import (
    SAMPLERS,
    FlowTable,
    fit_empty_latent,
    fit_noise_mask,
    from_model_space,
    resize_empty_latent,
    run_sampler,
    to_model_space,
)
from .sequence import Sequence, split_tokens
from .settings import AXES, FROM_MODEL, LoraSettings, ModelSettings
from .streaming import choose_streamed, stream_weights

SAMPLING = "sampling"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""By kind of device. Text encoders always run in these: T5 overflows in fp16."""


class Pipeline:
    """One rank's share of a model. All ranks make the same calls with the same values."""

    def __init__(
        self,
        transformer: nn.Module,
        facts: ModelFacts,
        *,
        settings: ModelSettings,
        mesh: Mesh,
        sequence: Sequence,
        loras: Loras,
    ) -> None:
        self.transformer = transformer
        self.facts, self._family, self._settings, self._mesh = facts, facts.spec, settings, mesh
        self._sequence, self._loras = sequence, loras
        self._dtype = _dtype(settings, mesh)
        self._reader = ConditioningReader(facts.spec, transformer.config, dtype=self._dtype, device=mesh.device)
        self._positions: int | None = transformer.config[facts.spec.positions] if facts.spec.positions else None
        predict = Predictor(transformer, facts.spec, dtype=self._dtype)
        replicas = mesh.group("data")
        self._predict = predict if replicas is None else Replicas(predict, replicas)
        self._text_encoder: TextEncoder | None = None
        self._autoencoder: Autoencoder | None = None

    @classmethod
    def load(cls, settings: ModelSettings, *, mesh: Mesh, progress: ReportProgress) -> Pipeline:
        """Everything that changes a model, in this order. Encoder and VAE are read when they are first used."""
        facts = inspect_model(settings.model, quant=settings.quant)
        _check_parts(settings)
        transformer, shapes = build_transformer(facts)
        swap_linears(
            transformer,
            facts.spec.tensor,
            head_dim=facts.head_dim,
            group=mesh.group("tensor"),
            stored=facts.stored,
        )
        held = {"shapes": shapes, "dtype": _dtype(settings, mesh), "device": mesh.device}
        streamed = choose_streamed(transformer, facts, settings.memory, **held)
        fill_transformer(transformer, facts, streamed=streamed, progress=progress, **held)
        sequence = Sequence(mesh, heads=facts.heads // mesh.degree("tensor"), joined=facts.spec.split.joined)
        if sequence.can_split:
            hold_hooks(transformer, [place.module for place in facts.spec.split.gathered])
            split_tokens(transformer, facts.spec.split, self_attention=facts.spec.self_attention, sequence=sequence)
        stream_weights(transformer, facts, streamed, settings.memory, **held)
        loras = Loras(transformer, facts.spec, **held)
        loras.use(settings.loras)
        return cls(transformer, facts, settings=settings, mesh=mesh, sequence=sequence, loras=loras)

    def use_loras(self, loras: Iterable[LoraSettings]) -> tuple[str, ...]:
        """Sample with these and no others from now on, without loading the model again; a line to tell of each.

        Raises `Refused` when one of them cannot be used; then nothing has changed.
        """
        return self._loras.use(loras)

    def encode_text(self, text: str, *, progress: ReportProgress) -> Conditioning | None:
        """The conditioning of a prompt; None on every rank but the first. Raises `Refused` without a text encoder."""
        folder, tokenizer = self._text_encoder_folders()  # on every rank, so that all refuse alike and stay
        if any(self._mesh.index(axis) for axis in AXES if axis != "tensor"):
            return None
        report = GroupProgress(progress, self._mesh.group("tensor"))
        if self._text_encoder is None:
            report(LOADING, 0, 1)
            self._text_encoder = self._load_text_encoder(folder, tokenizer)
        conditioning = self._text_encoder.encode(text, progress=report)
        return conditioning if self._mesh.rank == 0 else None

    @torch.inference_mode()
    def sample(self, request: Sample, *, progress: ReportProgress) -> torch.Tensor:
        """The latent after sampling, float32 on the CPU, on every rank: what KSampler returns for the same widgets."""
        form, family = self._family.latent, self._family
        latent = self._fitted(request)
        table = flow_table(request.settings, family, latent.shape)
        sigmas = sigmas_of(request, table)
        if not len(sigmas):
            return latent
        noise = noise_of(request, latent).to(self._mesh.device)
        latent = to_model_space(latent.to(self._mesh.device), mean=form.mean, std=form.std)
        mask = None if request.noise_mask is None else fit_noise_mask(request.noise_mask, noise.shape)
        reporter = self._step_reporter(request, progress)
        x = run_sampler(
            self._denoiser(request, noise, table),
            noise,
            latent,
            sigmas,
            table=table,
            sampler_name=request.settings.sampler_name,
            seed=request.settings.seed,
            cpu_noise_offset=request.cpu_noise_offset,
            mask=None if mask is None else mask.to(noise),
            progress=reporter,
            check=reporter.check,
        )
        return from_model_space(x, mean=form.mean, std=form.std).cpu()

    def decode(self, latent: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor | None:
        """`(B * F, H, W, 3)` float32 in 0..1 on the CPU; None on every rank but the first. Raises `Refused` without a VAE."""
        return self._vae(progress).decode(latent, progress=progress)

    def encode(self, pixels: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor | None:
        """The latent of `(N, H, W, 3)` in 0..1, float32 on the CPU; None on every rank but the first. Raises `Refused`
        without a VAE.
        """
        return self._vae(progress).encode(pixels, progress=progress)

    def _fitted(self, request: Sample) -> torch.Tensor:
        """The latent of a request in the shape the model samples in, float32 on the CPU. Raises `Refused` for one too large."""
        form = self._family.latent
        latent = resize_empty_latent(
            fit_empty_latent(request.latent.float().cpu(), channels=form.channels, dims=form.dims),
            spatial=(request.downscale[0] or form.spatial) / form.spatial,
            temporal=(request.downscale[1] or form.temporal) / form.temporal,
        )
        if self._positions is not None:
            check_positions(latent.shape, self._family, table=self._positions)
        return latent

    def _denoiser(self, request: Sample, x: torch.Tensor, table: FlowTable) -> Denoiser:
        """What the samplers call, for latents like `x`."""
        branches = pair_areas(
            *(
                [resolve_region(self._reader.read(entry, x, request.noise_mask), x.shape[2:]) for entry in branch]
                for branch in request.branches
            )
        )
        denoiser = Denoiser(
            self._predict,
            [[Entry.of(entry, x, percent_to_sigma=table.percent_to_sigma) for entry in branch] for branch in branches],
            scales=request.settings.scales,
            batch=x.shape[0],
            group=self._mesh.group("cfg"),
            keep_last=SAMPLERS[request.settings.sampler_name].negative,
        )
        self._sequence.share(over_cfg=not denoiser.uses_group)
        return denoiser

    def _step_reporter(self, request: Sample, progress: ReportProgress) -> StepReporter:
        if self._mesh.rank != 0:
            return StepReporter(progress, draw=None)
        place = {"decoders": request.preview_decoders, "device": self._mesh.device}
        draw, notice = previewer(request.preview, self._family.latent, **place)
        if notice:
            progress(SAMPLING, 0, 1, notice=notice, together=False)
        return StepReporter(progress, draw=draw)

    def _text_encoder_folders(self) -> tuple[Path, Path]:
        """Where text encoder and tokenizer are. Raises `Refused` when there are none."""
        if self._family.text_encoders:
            raise Refused(f"{self._family.title} takes {self._family.text_encoders}")
        folder, tokenizer = self.facts.text_encoder, self.facts.tokenizer
        if self._settings.text_encoder != FROM_MODEL:
            folder = Path(self._settings.text_encoder)
            tokenizer = next((path for path in (folder.parent / "tokenizer", folder) if path.is_dir()), None)
        if folder is None or tokenizer is None:
            raise Refused(
                f"{self.facts.name} comes without a text encoder: use a CLIP Loader (type wan) and CLIP Text Encode, or "
                f"choose the text_encoder folder of a diffusers model in Load Model"
            )
        return folder, tokenizer

    def _load_text_encoder(self, folder: Path, tokenizer: Path) -> TextEncoder:
        device, group = self._mesh.device, self._mesh.group("tensor")
        dtype, length = AUTO_DTYPE[device.type], self._family.text_length
        return TextEncoder.load(folder, tokenizer, length=length, dtype=dtype, device=device, group=group)

    def _vae(self, progress: ReportProgress) -> Autoencoder:
        """The VAE, read when it is first asked for. Raises `Refused` when there is none."""
        if self._autoencoder is None:
            path = self.facts.vae if self._settings.vae == FROM_MODEL else Path(self._settings.vae)
            if path is None:
                raise Refused(
                    f"{self.facts.name} comes without a VAE: use a VAE Loader with VAE Decode or VAE Encode, or choose a "
                    f"VAE in Load Model"
                )
            progress(LOADING, 0, 1)
            model, rows = load_autoencoder(path, self._family), Rows(self._mesh.group(*AXES))
            self._autoencoder = Autoencoder(model, form=self._family.latent, rows=rows, device=self._mesh.device)
        return self._autoencoder


class StepReporter:
    """The steps of a sampler as progress of the job, each with a preview where there is something to draw it."""

    def __init__(self, progress: ReportProgress, *, draw: Draw | None) -> None:
        self._progress, self._draw = progress, draw
        self._step, self._total = 0, 1

    def __call__(self, step: int, total: int, denoised: torch.Tensor) -> None:
        self._step, self._total = step, total
        preview = None if self._draw is None else self._draw(denoised)
        self._progress(SAMPLING, step, total, preview=preview)

    def check(self) -> None:
        """Stand at the step last told, between two model calls of it; the job may be cancelled here too."""
        self._progress(SAMPLING, self._step, self._total)


def _dtype(settings: ModelSettings, mesh: Mesh) -> torch.dtype:
    return DTYPES[settings.dtype] if settings.dtype != "auto" else AUTO_DTYPE[mesh.device.type]


def _check_parts(settings: ModelSettings) -> None:
    """Raise `Refused` for a part that this version cannot use, before a weight is read."""
    if settings.text_encoder_2 != FROM_MODEL:
        raise Refused(
            "text_encoder_2 is set, but no model with two text encoders reads them yet: leave it at 'from model'"
        )
    if settings.text_encoder != FROM_MODEL and not os.path.isdir(settings.text_encoder):
        raise Refused(
            f"{settings.text_encoder} is not a diffusers text_encoder folder, and single files are not available yet: use a "
            f"CLIP Loader (type wan) and CLIP Text Encode"
        )
    if settings.vae != FROM_MODEL and not os.path.exists(settings.vae):
        raise Refused(f"{settings.vae}: no such VAE. Choose a file or folder that is there")
