"""The environment variables that a user may set, checked before a process is started with them."""

from __future__ import annotations

import os

from .pool import pool_limit
from .rank_settings import KeepSettings


def check_environment() -> None:
    """Raise `ValueError`, with name, value and what may stand there, for one that has an odd value."""
    KeepSettings.from_environment(os.environ)
    pool_limit()
