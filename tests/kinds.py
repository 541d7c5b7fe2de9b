"""Degrees of every kind, and what is compared over them: each rank's latents with those of one."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from runtime.mesh import Mesh
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_on_one

LIMIT = 2e-6
KINDS = ("data", "cfg", "ring", "ulysses", "tensor")
FEW = [dict.fromkeys((kind,), 2) for kind in KINDS] + [{"ring": 2, "tensor": 2}]
MANY = [
    *(dict.fromkeys(pair, 2) for pair in combinations(KINDS, 2)),
    *(dict.fromkeys(three, 2) for three in combinations(KINDS, 3)),
    *({kind: 4} for kind in ("ring", "ulysses", "tensor")),
    *({kind: 3} for kind in KINDS),
    {"cfg": 2, "ulysses": 4},
    {"ring": 2, "ulysses": 3},
]
"""Every pair and three of kinds, and degrees that divide nothing."""


def compare(name: str, rows: dict[str, dict[str, Any]], degrees: dict[str, int], limit: float = LIMIT) -> None:
    """Each rank's latents against those of one."""
    cases = [Case(**row, model=f"random:{name}", steps=2, degrees=degrees) for row in rows.values()]
    references = run_on_one(cases)

    def run(mesh: Mesh) -> list[torch.Tensor]:
        pipelines = {}
        return [run_case(case, mesh, pipelines) for case in cases]

    errors = [list(map(relative_error, results, references)) for results in run_as_threads(degrees, run)]
    print("relative errors", *(f"{error:.1e}" for error in map(max, zip(*errors, strict=True))))
    assert max(map(max, errors)) < limit
