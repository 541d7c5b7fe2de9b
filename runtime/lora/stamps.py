"""LoRA files as they are now, the same ones on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..agreement import agree
from ..errors import Refused
from ..loaded_files import AGAIN, LoadedFiles
from ..mesh import Mesh
from ..settings import LoraSettings


def stamped(loras: Iterable[LoraSettings], files: LoadedFiles, *, mesh: Mesh) -> tuple[LoraSettings, ...]:
    """The same, each with a stamp that changes when its file does; `files` are theirs. All ranks call it together.

    Raises `Refused` on every rank where they do not find the same files: some would sample with another LoRA than the rest.
    """
    states = dict(files.states)
    found = tuple(lora.model_copy(update={"stamp": repr(states.get(lora.path))}) for lora in loras)
    if not found:
        return ()
    digest = int.from_bytes(hashlib.sha256(repr(files).encode(errors="surrogatepass")).digest()[:7], "big")
    differs = mesh.agree(digest) != digest
    agree(mesh, stop=False, failure=Refused(f"a LoRA file is just being written: {AGAIN}") if differs else None)
    return found
