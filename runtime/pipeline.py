"""A loaded model on one rank: text, sampling and decoding, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from .agreement import agree
from .areas import pair_areas
from .blocks import BlockRunner
from .casting import take_exact_timestep, take_model_dtype
from .checkpoint import build_transformer, fill_transformer
from .chosen_part import ChosenPart
from .components import Components
from .conditions import ConditioningReader
from .encoders.remembered import RememberedPrompts
from .experts import inspect_settings
from .finite import Weights, cause_of, check_latent
from .guidance import Denoiser, Entry
from .inspection import ModelFacts
from .kernels import Kernels
from .linear import hold_hooks, swap_linears
from .loaded_files import LoadedFiles
from .lora.apply import Loras
from .lora.experts import use_on
from .lora.names import LayerNames
from .lora.stamps import stamped
from .mesh import Mesh
from .number_formats import dtype_of
from .offload.host_copy import sharing
from .parts import check_offload, check_parts
from .picture_tokens import read_pictures
from .prediction import ByNoise, Predictor, check_positions
from .previews import previewer
from .progress import ReportProgress
from .protocol import Conditioning, Sample
from .quant.kernels import usable_kernels
from .regions import resolve_region
from .release import release_memory
from .replicas import Replicas
from .room import bytes_needed
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
from .settings import LoraSettings, ModelSettings
from .steps import SAMPLING, StepReporter
from .streaming import choose_streamed, stream_weights
from .weighing import Bytes, weigh


class Expert(NamedTuple):
    """A transformer that is ready to run, and what is put on it."""

    transformer: nn.Module
    facts: ModelFacts
    loras: Loras
    held: Bytes
    """What its weights take, wherever they are, and the slots that streamed ones come into."""
    runner: BlockRunner | None
    files: LoadedFiles
    """Where it was read from."""
    reads_files: bool
    """Whether it still does, as it runs."""


class Pipeline:
    """One rank's share of a model. All ranks make the same calls with the same values."""

    def __init__(
        self,
        experts: Iterable[Expert],
        facts: ModelFacts,
        *,
        settings: ModelSettings,
        mesh: Mesh,
        sequence: Sequence,
        components: Components,
        kernels: Kernels | None = None,
    ) -> None:
        self.experts, self.facts = tuple(experts), facts
        self._family, self._mesh = facts.spec, mesh
        self._sequence, self._components, self._kernels = sequence, components, kernels
        config = self.transformer.config
        self._dtype = dtype_of(settings, mesh)
        self._reader = ConditioningReader(facts.spec, config, dtype=self._dtype, device=mesh.device)
        self._positions: int | None = config[facts.spec.positions] if facts.spec.positions else None
        predictors = [Predictor(each.transformer, facts.spec, dtype=self._dtype) for each in self.experts]
        predict = ByNoise(*predictors, boundary=facts.boundary) if len(predictors) > 1 else predictors[0]
        self._predict = predict if (replicas := mesh.group("data")) is None else Replicas(predict, replicas)

    @classmethod
    def load(
        cls,
        settings: ModelSettings,
        *,
        mesh: Mesh,
        progress: ReportProgress,
        prompts: RememberedPrompts | None = None,
        make_room: Callable[[Bytes], None] = lambda needed: None,
    ) -> Pipeline:
        """The transformer, or the pair of them; encoder and VAE are read when they are first used. `make_room` is called before
        either, with what it will take.
        """
        facts = inspect_settings(settings)
        check_parts(settings, facts.spec)
        check_offload(facts, settings.memory)
        make_room(bytes_needed(facts, settings, mesh))
        sequence = Sequence(mesh, heads=facts.heads // mesh.degree("tensor"), joined=facts.spec.split.joined)
        kinds = [kind for each in facts.experts for stored in each.stored.values() for kind in stored.kinds]
        kernels = usable_kernels(kinds, dtype=dtype_of(settings, mesh), device=mesh.device)
        share = {"mesh": mesh, "sequence": sequence}
        experts = [_load_expert(each, settings, kernels=kernels, progress=progress, **share) for each in facts.experts]
        use_on([expert.loras for expert in experts], settings.loras)
        components = Components(settings, facts, mesh=mesh, prompts=prompts, make_room=make_room)
        return cls(experts, facts, settings=settings, components=components, kernels=kernels, **share)

    @property
    def transformer(self) -> nn.Module:
        """The first of the experts; of most models the only one."""
        return self.experts[0].transformer

    @property
    def held(self) -> Bytes:
        """What its weights take now, those of the parts that have been read, and the LoRAs."""
        experts = (expert.held + expert.loras.held for expert in self.experts)
        return sum(experts, weigh(self._components.modules))

    @property
    def parts(self) -> tuple[ChosenPart, ...]:
        """The parts beside the transformers that have been read and stay on the device."""
        return self._components.staying

    @property
    def changed(self) -> str:
        """Which files of the transformers are no longer what they were when they were read, in words; empty for none."""
        return next((words for expert in self.experts if (words := expert.files.changed)), "")

    def use_parts(self, settings: ModelSettings) -> None:
        """Use the text encoders and VAE of these settings from now on. Raises `Refused` where one is missing, as `load`."""
        check_parts(settings, self._family)
        self._components.use(settings)

    def use_loras(self, loras: Collection[LoraSettings]) -> tuple[str, ...]:
        """Sample with these and no others from now on, without loading the model again; a line to tell of each. All ranks
        call it together. Raises `Refused` when one of them cannot be used; then nothing has changed.
        """
        files = LoadedFiles.of(lora.path for lora in loras)
        told = use_on([expert.loras for expert in self.experts], stamped(loras, files, mesh=self._mesh))
        if files.states:
            agree(self._mesh, stop=False, failure=files.check_read())
        return told

    def encode_text(
        self, text: str, *, progress: ReportProgress, loras: Collection[LoraSettings] = ()
    ) -> Conditioning | None:
        """The conditioning of a prompt, by an encoder with the parts of these LoRAs that are for it; None on every rank but
        the first. Raises `Refused` without a text encoder.
        """
        loras = stamped(loras, LoadedFiles.of(lora.path for lora in loras), mesh=self._mesh)
        return self._components.encode_text(text, loras=loras, progress=progress)

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
        mask = None if request.noise_mask is None else fit_noise_mask(request.noise_mask, noise.shape).to(noise)
        held = [Weights.of(*expert[:2], streamed=expert.runner is not None) for expert in self.experts]
        look = partial(check_latent, mesh=self._mesh, cause=partial(cause_of, request, held, dtype=self._dtype))
        with self._step_reporter(request, progress, look) as reporter:
            x = run_sampler(
                self._denoiser(request, noise, mask, table),
                noise,
                latent,
                sigmas,
                table=table,
                sampler_name=request.settings.sampler_name,
                seed=request.settings.seed,
                cpu_noise_offset=request.cpu_noise_offset,
                mask=mask,
                keep_clean=family.sees_kept_clean,
                progress=reporter,
                check=reporter.check,
            )
        latent = from_model_space(x, mean=form.mean, std=form.std).cpu()
        look(latent)
        return latent

    def decode(self, latent: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor | None:
        """`(B * F, H, W, 3)` float32 in 0..1 on the CPU; None on every rank but the first. Raises `Refused` without a VAE."""
        with self._components.vae(progress) as vae:
            return vae.decode(latent, progress=progress)

    def encode(self, pixels: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor | None:
        """The latent of pictures `(N, H, W, 3)` in 0..1, on the CPU; None on all ranks but the first. Raises as `decode`."""
        with self._components.vae(progress) as vae:
            return vae.encode(pixels, progress=progress)

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

    def _denoiser(self, request: Sample, x: torch.Tensor, mask: torch.Tensor | None, table: FlowTable) -> Denoiser:
        """What the samplers call, for latents like `x` of which a mask is painted anew."""
        branches = pair_areas(
            *(
                [resolve_region(self._reader.read(entry, x, mask), x.shape[2:]) for entry in branch]
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
            perpendicular=request.settings.is_perpendicular,
        )
        self._sequence.share(over_cfg=not denoiser.uses_group)
        return denoiser

    def _step_reporter(
        self, request: Sample, progress: ReportProgress, look: Callable[[torch.Tensor], None]
    ) -> StepReporter:
        runners = [expert.runner for expert in self.experts if expert.runner is not None]
        files = [expert.files for expert in self.experts if expert.reads_files]
        shown = {"look": look, "runners": runners, "files": files}
        if self._mesh.rank != 0:
            return StepReporter(progress, draw=None, **shown)
        place = {"decoders": request.preview_decoders, "device": self._mesh.device}
        draw, notice = previewer(request.preview, self._family.latent, **place)
        lines = (notice, self._kernels and str(self._kernels), *self._reader.without_effect(request.branches))
        for line in filter(None, lines):
            progress(SAMPLING, 0, 1, notice=line, together=False)
        return StepReporter(progress, draw=draw, **shown)


def _load_expert(
    facts: ModelFacts,
    settings: ModelSettings,
    *,
    mesh: Mesh,
    sequence: Sequence,
    kernels: Kernels | None,
    progress: ReportProgress,
) -> Expert:
    """Everything that changes a transformer, in this order."""
    files = LoadedFiles.of(source.path for source in facts.sources)
    transformer, shapes = build_transformer(facts)
    stored = facts.stored if kernels is None else {name: kernels.of(each) for name, each in facts.stored.items()}
    swap_linears(transformer, facts.spec.tensor, head_dim=facts.head_dim, group=mesh.group("tensor"), stored=stored)
    if facts.spec.picture_tokens:
        read_pictures(transformer.get_submodule(facts.spec.picture_tokens))
    held = {"shapes": shapes, "dtype": dtype_of(settings, mesh), "device": mesh.device}
    streamed = choose_streamed(transformer, facts, settings.memory, mesh=mesh, **held)
    copies = sharing(mesh.group("data", "cfg", "ring", "ulysses"))
    reads = fill_transformer(transformer, facts, streamed=streamed, progress=progress, group=copies, **held)
    release_memory()  # what reading has worked with
    take_model_dtype(transformer, facts.spec.in_model_dtype, dtype=held["dtype"])
    if facts.spec.rounded_timestep and held["dtype"] != torch.float32:
        pattern, factor = facts.spec.rounded_timestep
        take_exact_timestep(transformer, pattern, factor=factor)
    if sequence.can_split or facts.spec.split.on_one_rank:
        hold_hooks(transformer, [place.module for place in facts.spec.split.gathered])
        split_tokens(transformer, facts.spec.split, self_attention=facts.spec.self_attention, sequence=sequence)
    filled = weigh([transformer])
    runner = stream_weights(transformer, facts, streamed, settings.memory, mesh=mesh, **held)
    loras = Loras(transformer, partial(LayerNames, facts.spec), group=copies, **held)
    slots = 0 if runner is None else runner.slot_bytes
    agree(mesh, stop=False, failure=files.check_read())
    return Expert(transformer, facts, loras, filled + Bytes.on(mesh.device, slots), runner, files, reads)
