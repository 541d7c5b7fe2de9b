"""A model without a family, on one rank, through diffusers' own pipeline: the calls of `Pipeline`, without its parallelism.

The prompt goes to the pipeline as the text that it is, and the latent is taken from the pipeline where it would decode it:
there it is in the VAE's own space, as ComfyUI's latents are between nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_log
from safetensors import SafetensorError
from torch import nn
from transformers.utils.logging import disable_progress_bar

from .chosen_part import ChosenPart
from .configuration import NONSENSE
from .encoders.vae import DECODING
from .errors import Refused
from .finite import Weights, cause_in, not_finite
from .loaded_files import LoadedFiles
from .mesh import Mesh
from .number_formats import dtype_of
from .out_of_memory import is_out_of_memory
from .own_call import Taken, Way, arguments_of, check_latent, check_request
from .progress import ReportProgress
from .prompt_text import as_conditioning
from .protocol import LOADING, Conditioning, Sample
from .settings import LoraSettings, ModelSettings
from .steps import SAMPLING
from .weighing import Bytes, weigh
from .without_spec import OwnPipeline, check_alone, pipeline_without_spec

COLOURS = 3
AFTERWARDS = ("safety_checker", "watermark")
"""What pipelines do to a picture after it is decoded, by the names of what does it."""


class DiffusersPipeline:
    """A pipeline of diffusers' own, whose last step, decoding, is a request of its own here."""

    def __init__(
        self, pipeline: Any, found: OwnPipeline, way: Way, *, files: LoadedFiles, device: torch.device
    ) -> None:
        self._pipeline, self._found, self._way, self._device = pipeline, found, way, device
        self._files = files
        self._vae = pipeline.vae.float()  # as ours are: some overflow in fp16
        pipeline.vae = TakesLatent(self._vae)

    @classmethod
    def load(
        cls,
        settings: ModelSettings,
        *,
        mesh: Mesh,
        progress: ReportProgress,
        prompts: Any = None,
        make_room: Callable[[Bytes], None] = lambda needed: None,
    ) -> DiffusersPipeline:
        """All parts of the folder, on the device. Raises `Refused` for what cannot be used."""
        found = pipeline_without_spec(settings.model)
        check_alone(found, settings)
        kind, way = class_of(found)
        files = LoadedFiles.of([found.path])
        diffusers_log.set_verbosity_error()  # its warnings quote prompts
        diffusers_log.disable_progress_bar()
        disable_progress_bar()
        make_room(Bytes.on(mesh.device, found.nbytes))
        progress(LOADING, 0, found.nbytes)
        try:
            options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
            options["variant"] = found.variant
            pipeline = kind.from_pretrained(found.path, torch_dtype=dtype_of(settings, mesh), **options)
        except (OSError, ImportError, SafetensorError, *NONSENSE) as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            raise Refused(
                f"{found.path} cannot be loaded by diffusers' {found.kind} ({reason}): download it again"
            ) from error
        pipeline.set_progress_bar_config(disable=True)
        if failure := files.check_read():
            raise failure
        progress(LOADING, found.nbytes, found.nbytes)
        return cls(pipeline.to(mesh.device), found, way, files=files, device=mesh.device)

    @property
    def held(self) -> Bytes:
        """What the weights of all its parts take."""
        return weigh([self._vae, *(part for part in self._pipeline.components.values() if isinstance(part, nn.Module))])

    @property
    def parts(self) -> tuple[ChosenPart, ...]:
        """None that was chosen: they are loaded with the model."""
        return ()

    @property
    def changed(self) -> str:
        """Which of its files are no longer what they were when they were read, in words; empty for none."""
        return self._files.changed

    def use_parts(self, settings: ModelSettings) -> None:
        """Raises `Refused` for any that are not its own."""
        check_alone(self._found, settings)

    def use_loras(self, loras: Iterable[LoraSettings]) -> tuple[str, ...]:
        """Raises `Refused` for any."""
        for lora in loras:
            raise Refused(f"{lora.path}: {self._found.kind} takes no LoRA here: remove Outrigger LoRA")
        return ()

    def encode_text(
        self, text: str, *, progress: ReportProgress, loras: Iterable[LoraSettings] = ()
    ) -> Conditioning | None:
        """The prompt itself: the pipeline encodes it with every sample, in its own way."""
        self.use_loras(loras)
        return as_conditioning(text)

    @torch.inference_mode()
    def sample(self, request: Sample, *, progress: ReportProgress) -> torch.Tensor:
        """The latent after all steps, float32 on the CPU, in the VAE's own space. Raises `Refused`, with its name, for what
        the pipeline cannot honour.
        """
        check_request(request, self._found)
        taken = Taken.by(self._pipeline, self._vae, request)
        arguments = arguments_of(request, taken, self._way)
        progress = self._watched(progress)
        if request.preview != "none":
            progress(SAMPLING, 0, 1, notice=f"no previews: {self._found.kind} shows its latent in no known colours")
        for part in AFTERWARDS:
            if getattr(self._pipeline, part, None) is not None:
                notice = f"{self._found.kind}'s {part} is left out: Decode makes the picture alone"
                progress(SAMPLING, 0, 1, notice=notice)
        progress(SAMPLING, 0, request.settings.steps)
        try:
            self._pipeline(**arguments, **self._way.reporting(self._pipeline, progress))
        except LatentTaken as result:
            check_latent(result.latent, taken, self._found)
            self._check_finite(result.latent)
            return result.latent.float().cpu()
        raise Refused(f"{self._found.kind} did not hand a latent to its VAE: it cannot be run from these nodes")

    def _check_finite(self, latent: torch.Tensor) -> None:
        if not latent.isfinite().all():
            parts = {name: part for name, part in self._pipeline.components.items() if isinstance(part, nn.Module)}
            held = [Weights(f"{self._found.path}/{name}", part) for name, part in parts.items()]
            raise not_finite(cause_in(held, dtype=self._pipeline.dtype))

    @torch.inference_mode()
    def decode(self, latent: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor:
        """`(B, C, H, W)` or `(B, C, F, H, W)` -> `(B * F, H, W, 3)` float32 in 0..1 on the CPU."""
        progress = self._watched(progress)
        progress(DECODING, 0, 1)
        try:
            pictures = self._decoded(latent.float().to(self._device))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise Refused(
                f"the latent has shape {tuple(latent.shape)}, which this VAE does not decode ({error})"
            ) from error
        if not pictures.isfinite().all():
            raise Refused(
                f"{self._found.path}/vae made numbers that are not finite (nan or inf) of the latent, a black picture: download it "
                f"again, or look at the node that the latent comes from"
            )
        progress(DECODING, 1, 1)
        colours = 2 if pictures.ndim == 5 and pictures.shape[1] != COLOURS else 1  # a few have them behind the frames
        pictures = ((pictures.float() + 1.0) / 2.0).clamp_(0.0, 1.0).movedim(colours, -1).cpu()
        return pictures.flatten(0, -4)

    def _watched(self, progress: ReportProgress) -> ReportProgress:
        """The same, where a call ends with an error once a file has been written to that the model runs from."""

        def report(*step: Any, **others: Any) -> None:
            if self._device.type == "cpu" and (failure := self._files.check()):
                raise failure
            progress(*step, **others)

        return report

    def _decoded(self, latent: torch.Tensor) -> torch.Tensor:
        try:
            return self._vae.decode(latent, return_dict=False)[0]
        except NotImplementedError:
            self._vae.enable_tiling()  # without tiles, some are not implemented
            return self._vae.decode(latent, return_dict=False)[0]

    def encode(self, pixels: torch.Tensor, *, progress: ReportProgress) -> torch.Tensor:
        """Raises `Refused`: such a pipeline begins from noise alone."""
        raise Refused(
            f"{self._found.kind} begins from noise alone, so that there is nothing to encode: remove this node"
        )


class LatentTaken(Exception):
    """Ends a pipeline's call at the point where it would decode its `latent`."""

    def __init__(self, latent: torch.Tensor) -> None:
        super().__init__("a latent is there")
        self.latent = latent


class TakesLatent:
    """Stands in for the VAE of a pipeline: the same to look at, but it keeps what it is given to decode."""

    def __init__(self, vae: nn.Module) -> None:
        self._vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    @property
    def __class__(self) -> type:
        """The VAE's: by its class a pipeline may tell how its latents are scaled."""
        return type(self._vae)

    def decode(self, latent: torch.Tensor, *others: Any, **options: Any) -> None:
        """Raises `LatentTaken`."""
        raise LatentTaken(latent)


def class_of(found: OwnPipeline) -> tuple[type, Way]:
    """The class, and how it is called. Raises `Refused` where this diffusers has none, or it is called in another way."""
    kind = getattr(diffusers, found.kind, None)
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise Refused(
            f"{found.path} is a {found.kind}, which diffusers {diffusers.__version__} does not have: update it"
        )
    return kind, Way.of(kind, found)
