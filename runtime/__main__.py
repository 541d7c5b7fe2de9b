"""The command line: `python -m runtime COMMAND`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from .commands import COMMANDS
from .commands.output import refused
from .commands.parser import parser_of
from .errors import SidecarError
from .out_of_memory import in_words, is_out_of_memory

INTERRUPTED = 130
"""What a shell gives for Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    chosen = parser_of(COMMANDS).parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return chosen.run(chosen)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        reason = _reason(error, offload=getattr(chosen, "offload", "disk"))
        if reason is None:
            raise
        print(f"error: {reason}", file=sys.stderr)
        if getattr(chosen, "json", False):
            print(json.dumps(refused(reason, error)))
        return 1


def _reason(error: Exception, *, offload: str) -> str | None:
    """An error in the user's words: of the system also of which file; None for one that nobody has foreseen."""
    if isinstance(error, SidecarError):
        return str(error)
    if is_out_of_memory(error):
        return in_words(error, device="cpu", offload=offload)
    if isinstance(error, OSError):
        return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    return str(error) if isinstance(error, ValueError) else None


if __name__ == "__main__":
    sys.exit(main())
