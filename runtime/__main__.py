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
    except (ValueError, OSError, SidecarError) as error:
        reason = _of_system(error) if isinstance(error, OSError) else str(error)
        print(f"error: {reason}", file=sys.stderr)
        if getattr(chosen, "json", False):
            print(json.dumps(refused(reason, error)))
        return 1


def _of_system(error: OSError) -> str:
    """What the system says, and of which file: no room, no permission, a folder where a file should be."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


if __name__ == "__main__":
    sys.exit(main())
