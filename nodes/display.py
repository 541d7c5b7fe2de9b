"""What one node shows while the sidecar works for it: progress bar, previews, a line of text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from PIL import Image

from . import host

if TYPE_CHECKING:
    from ..runtime.protocol import Notice, Progress

log = logging.getLogger("outrigger")


class NodeDisplay:
    """Shows events on a node.

    The steps of `stage` move the progress bar; every other stage (loading, compiling) is a line of text. Whatever
    ComfyUI raises after Cancel is kept as `cancelled`, so that the job is stopped in order and not by an exception
    that passes through.
    """

    def __init__(self, node_id: str | None, *, stage: str) -> None:
        self.node_id, self.stage, self.cancelled = node_id, stage, False
        self._move_bar: Callable[..., None] | None = None
        self._shown = ""
        self._notices: list[str] = []

    def progress(self, event: Progress) -> None:
        """Show how far the job is."""
        if event.stage != self.stage:
            self.text(event.line)
        elif event.step or event.preview is not None:
            self._bar(event.step, event.total, _picture(event.preview))

    def notice(self, event: Notice) -> None:
        """Show what the sidecar says the user should know."""
        self.tell(event.text)

    def tell(self, line: str) -> None:
        """Show what the user should know, now and when the job is done, and log it."""
        log.info("Outrigger: %s", line)
        self._notices.append(line)
        self.text(line)

    def finished(self, seconds: float, *, memory: str) -> None:
        """Show that the job is done, what is loaded, and again what the user should know."""
        lines = [*dict.fromkeys(self._notices), memory, f"{self.stage} took {seconds:.2f} s"]
        self.text("\n".join(filter(None, lines)))

    def text(self, line: str) -> None:
        """Show a line of text on the node."""
        if line != self._shown:
            self._shown = line
            host.show_text(line, self.node_id)

    def _bar(self, step: int, total: int, preview: tuple[str, Image.Image, int] | None) -> None:
        if self._move_bar is None:
            self._move_bar = host.progress_bar(total, self.node_id)
        try:
            self._move_bar(step, total, preview)
        except host.Interrupted:
            self.cancelled = True


def _picture(preview: Any) -> tuple[str, Image.Image, int] | None:
    """`(H, W, 3)` uint8 as ComfyUI's hook takes it: format, picture, largest side."""
    if preview is None:
        return None
    return "JPEG", Image.fromarray(preview.cpu().numpy()), host.preview_size()
