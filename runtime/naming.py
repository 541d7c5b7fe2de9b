"""Modules of a model by what they are called."""

from __future__ import annotations

import re

from torch import nn


def modules_called(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules whose whole name fits a pattern, by name. Raises `RuntimeError` where there are none."""
    found = {name: module for name, module in model.named_modules() if re.fullmatch(pattern, name)}
    if not found:
        raise RuntimeError(f"no module of {type(model).__name__} is called {pattern}")
    return found
