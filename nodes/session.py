"""The one sidecar of this ComfyUI process: started on first use, found by every node, started again after a crash."""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import closing
from typing import Any, TypeVar

import torch

from ..runtime.client import Comparison, Sidecar
from ..runtime.errors import Cancelled, SidecarError, in_our_words
from ..runtime.protocol import (
    Check,
    Conditioning,
    Decode,
    EncodePixels,
    EncodeText,
    Notice,
    Planned,
    Progress,
    Result,
    Sample,
    Work,
)
from ..runtime.settings import ModelSettings, SampleSettings
from . import convert, host
from .display import NodeDisplay
from .truce import StandIn

log = logging.getLogger("outrigger")

Request = TypeVar("Request", EncodeText, Sample, Check, Decode, EncodePixels)


class SidecarFailure(RuntimeError):
    """What went wrong in the sidecar and is not a matter of a widget: rank, stage and step, and the traceback there."""

    __module__ = "outrigger"


class _Session:
    """The process handle, the only state of the pack."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sidecar: Sidecar | None = None
        self._stand_in: StandIn | None = None

    @property
    def stand_in(self) -> StandIn:
        """What stands for the sidecar among ComfyUI's loaded models."""
        if self._stand_in is None:
            self._stand_in = StandIn(self.free)
        return self._stand_in

    def free(self) -> bool:
        """Have the sidecar let go of everything; False while a job runs. What is gone has let go."""
        if self._sidecar is None or not self._sidecar.alive:
            return True
        try:
            report = self._sidecar.free()
        except SidecarError:
            return True
        return report is not None and not report.busy

    def memory(self) -> str:
        """What the ranks have loaded now, in a line; ComfyUI's list of models has it as well."""
        try:
            report = self.sidecar().status()
        except SidecarError:
            return ""
        self.stand_in.note(report)
        return report.memory

    def sidecar(self) -> Sidecar:
        """The sidecar, alive. Raises `SidecarError` when it cannot be started."""
        with self._lock:
            if self._sidecar is not None and not self._sidecar.alive:
                self._sidecar.close()
                self._sidecar = None
            if self._sidecar is None:
                self._sidecar = Sidecar.start(log=log.info)
            return self._sidecar


_session = _Session()


def encode_text(model: ModelSettings, text: str, display: NodeDisplay) -> Conditioning:
    """The prompt, encoded with the model's own text encoder. Raises as `run` does."""
    if not isinstance(text, str):  # said here, because an error is logged, and a prompt must not be
        raise ValueError(f"text: connect or write a text; this input holds {type(text).__name__}")
    return run(_request(EncodeText, model, text=text), display).conditioning


def sample(model: ModelSettings, settings: SampleSettings, *, display: NodeDisplay, **inputs: Any) -> torch.Tensor:
    """The denoised latent. `inputs` are those of `Sample`: conditioning, latent and what goes with them.

    Raises as `run` does.
    """
    return run(_sampling(Sample, model, settings, inputs), display).latent


def check(model: ModelSettings, settings: SampleSettings, *, display: NodeDisplay, **inputs: Any) -> Planned:
    """The plan of that, without running it: no rank is started for it. Raises as `run` does where it would be refused."""
    return run(_sampling(Check, model, settings, inputs), display)


def _sampling(kind: type[Request], model: ModelSettings, settings: SampleSettings, inputs: dict[str, Any]) -> Request:
    preview = host.preview_kind()
    return _request(
        kind,
        model,
        settings=settings,
        cpu_noise_offset=host.cpu_noise_offset(),
        preview=preview,
        preview_decoders=host.preview_decoders() if preview == "taesd" else (),
        **inputs,
    )


def decode(model: ModelSettings, latent: torch.Tensor, display: NodeDisplay) -> torch.Tensor:
    """The pictures of a latent, `(B * F, H, W, 3)` in 0..1. Raises as `run` does."""
    return run(_request(Decode, model, latent=latent), display).images


def encode(model: ModelSettings, pixels: torch.Tensor, display: NodeDisplay) -> torch.Tensor:
    """The latent of pictures, `(N, H, W, 3)` in 0..1. Raises as `run` does."""
    return run(_request(EncodePixels, model, pixels=pixels), display).latent


def compared(latent: torch.Tensor, reference: torch.Tensor, planned: Planned) -> str:
    """How far the latent of a plan is from the one that it should be, in words."""
    return f"{Comparison.of(latent, reference, tolerance=planned.tolerance)}\n{planned.plan}".rstrip()


def run(request: Work, display: NodeDisplay) -> Result:
    """Have the sidecar do a request, and show how it goes.

    Raises `ValueError` for what the user can put right, `SidecarFailure` for what they cannot,
    `torch.OutOfMemoryError` so that ComfyUI makes room, and ComfyUI's interrupt after Cancel.
    """
    try:
        result = _follow(request, display)
    except Cancelled:
        host.interrupt()
    except SidecarError as error:
        raise _as_comfyui_shows_it(error) from error
    display.finished(result.seconds, memory=_session.memory())
    return result


def _follow(request: Work, display: NodeDisplay) -> Result:
    if host.interrupted():
        raise Cancelled
    sidecar = _session.sidecar()
    _session.stand_in.make_room(sidecar.status(request.model, request.part))
    with closing(sidecar.call(request, interrupted=lambda: display.cancelled or host.interrupted())) as events:
        for event in events:
            match event:
                case Progress():
                    display.progress(event)
                case Notice():
                    display.notice(event)
                case Result():
                    return event
    raise SidecarError("the sidecar ended the job without a result: queue the prompt again")


def _request(kind: type[Request], model: Any, **fields: Any) -> Request:
    """A request of that kind. Raises `ValueError` with one sentence per value that does not fit in."""
    return in_our_words(kind, job=uuid.uuid4().hex, model=convert.to_model(model), **fields)


def _as_comfyui_shows_it(error: SidecarError) -> Exception:
    if error.out_of_memory:
        return torch.OutOfMemoryError(str(error))
    return SidecarFailure(str(error))
