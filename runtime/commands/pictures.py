"""Pictures to a file: PNG by pillow, video as MP4 by PyAV."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import Refused
from .output import check_can_write

if TYPE_CHECKING:
    import torch

PICTURE, VIDEO = ".png", ".mp4"
FRAMES_PER_SECOND = 16
"""Wan's."""


def check_path(path: Path, *, frames: int) -> None:
    """Raise `Refused` for a file that cannot be written, before anything is computed."""
    suffix = path.suffix.lower()
    if suffix not in (PICTURE, VIDEO):
        raise Refused(f"{path}: name a {PICTURE} file for a picture or a {VIDEO} file for a video")
    if suffix == PICTURE and frames > 1:
        raise Refused(f"{path} holds one picture, but frames is {frames}: name a {VIDEO} file, or set frames to 1")
    check_can_write(path)
    if suffix == VIDEO:
        _av()


def write(images: torch.Tensor, path: Path) -> None:
    """`(F, H, W, 3)` in 0..1 to a file of the kind that its name says; a picture is the first of them."""
    frames = (images * 255.0).round().clamp(0, 255).byte().numpy()
    if path.suffix.lower() == PICTURE:
        from PIL import Image

        return Image.fromarray(frames[0]).save(path)
    av = _av()
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"crf": "17"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return None


def _av() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise Refused(
            f'a video needs PyAV, which is not installed: run "python -m pip install av", or name a {PICTURE} file'
        ) from error
    return av
