"""Times on a machine that others use as well."""

from __future__ import annotations

from collections.abc import Callable


def least(measure: Callable[[], float], *, enough: float, tries: int = 5) -> float:
    """The least of up to so many measurements; no more are made once one is under `enough`.

    Other programs make a measurement longer and never shorter, so one that is under the bound shows what the code takes;
    code that is slow itself is over it each time.
    """
    best = float("inf")
    for _ in range(tries):
        best = min(best, measure())
        if best < enough:
            break
    return best
