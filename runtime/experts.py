"""What Load Model names, as one model: of one transformer, or of two experts that take turns by how much noise there is.

Wan 2.2 A14B is such a pair: one for high noise and one for low noise, each a whole transformer of the family. Which of them
runs is decided at each call of the model, by its sigma; both are loaded with the same settings.
"""

from __future__ import annotations

from dataclasses import replace

from .errors import Refused
from .inspection import ModelFacts, inspect_model
from .settings import ModelSettings


def inspect_settings(settings: ModelSettings) -> ModelFacts:
    """The facts of a model, with those of its second expert where there is one. Raises `Refused` for what is no pair."""
    facts = inspect_model(settings.model, quant=settings.quant)
    second = settings.model_low_noise or str(facts.transformer_2 or "")
    if second:
        return _pair(facts, inspect_model(second, quant=settings.quant), boundary=settings.boundary)
    if settings.boundary:
        raise Refused(
            f"boundary {settings.boundary:g} is where a second model takes over, but there is none: choose model_low_noise, or "
            f"set boundary to 0"
        )
    return facts


def _pair(high: ModelFacts, low: ModelFacts, *, boundary: float) -> ModelFacts:
    if not high.spec.boundary:
        raise Refused(
            f"{high.name} is {high.spec.title}, which comes as one model: leave model_low_noise empty, it is for the two "
            f"experts of Wan 2.2"
        )
    if _kind(high) != _kind(low):
        raise Refused(
            f"{high.name} ({_described(high)}) and {low.name} ({_described(low)}) are no pair: choose the two experts of one "
            f"model, the one of high noise as model and the one of low noise as model_low_noise"
        )
    if high.sources and [source.path for source in high.sources] == [source.path for source in low.sources]:
        raise Refused(f"model and model_low_noise are both {high.name}: choose the other expert for one of them")
    return replace(high, low_noise=low, boundary=boundary or high.boundary or high.spec.boundary)


def _kind(facts: ModelFacts) -> tuple:
    """What two experts have in common."""
    return facts.family, facts.heads, facts.head_dim, facts.layers, facts.config[facts.spec.text_width]


def _described(facts: ModelFacts) -> str:
    return f"{facts.spec.title}, {facts.layers} layers of {facts.heads} heads"
