"""The command line: `python -m runtime COMMAND`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from .commands import COMMANDS
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
    except (ValueError, SidecarError) as error:
        print(f"error: {error}", file=sys.stderr)
        if getattr(chosen, "json", False):
            print(json.dumps({"ok": False, "reason": str(error)}))
        return 1


if __name__ == "__main__":
    sys.exit(main())
