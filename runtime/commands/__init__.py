"""The commands of `python -m runtime`. A new one is a module and a line here.

Each module has a first line that says what the command does, `add_arguments(parser)`, and `run(chosen) -> exit status`.
None imports torch before it runs.
"""

from __future__ import annotations

from types import ModuleType

from . import bench, doctor, generate, plan, quantize, serve, verify

COMMANDS: dict[str, ModuleType] = {
    "serve": serve,
    "generate": generate,
    "plan": plan,
    "verify": verify,
    "quantize": quantize,
    "bench": bench,
    "doctor": doctor,
}
