"""A command's own sidecar: started, asked, and ended with the command."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..client import Sidecar
from ..errors import SidecarError
from ..protocol import Decode, Decoded, Encoded, EncodeText, Notice, Progress, Result, Sample, Sampled
from ..settings import ModelSettings
from .flags import checked

log = logging.getLogger("outrigger")


class Asker:
    """Has a sidecar do requests, and logs the stages, and each notice once; the sidecar itself logs the rest. Raises as
    `Sidecar.call`, and `Refused` for a bad request.
    """

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar, self._stage = sidecar, ""
        self._told: set[str] = set()

    def encode(self, model: ModelSettings, text: str) -> Encoded:
        """The prompt, encoded with the model's own text encoder."""
        return self._result(EncodeText, model=model, text=text)

    def sample(self, model: ModelSettings, **fields: Any) -> Sampled:
        """The denoised latent. `fields` are further ones of `Sample`."""
        return self._result(Sample, model=model, **fields)

    def decode(self, model: ModelSettings, latent: Any) -> Decoded:
        """The pictures of a latent."""
        return self._result(Decode, model=model, latent=latent)

    def memory(self) -> list[dict[str, Any]]:
        """What each rank has loaded, and what it takes."""
        report = self._sidecar.status()
        return [
            {"rank": rank.rank, "device": device, "resident_bytes": rank.resident_bytes, "models": rank.memory.sizes}
            for rank, device in zip(report.ranks, report.devices, strict=True)
        ]

    def _result(self, kind: Any, **fields: Any) -> Any:
        for event in self._sidecar.call(checked(kind, job=uuid.uuid4().hex, **fields), interrupted=lambda: False):
            match event:
                case Progress(stage=stage) if stage != self._stage:
                    self._stage = stage
                    log.info(stage)
                case Notice(text=text) if text not in self._told:
                    self._told.add(text)
                    log.info(text)
                case Result():
                    return event
        raise SidecarError("the sidecar ended the job without a result")


@contextmanager
def own_sidecar() -> Iterator[Asker]:
    """A sidecar for one command, which is gone afterwards with its ranks."""
    sidecar = Sidecar.start(log=log.info)
    try:
        yield Asker(sidecar)
    finally:
        sidecar.close()
