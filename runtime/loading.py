"""The pipeline for a model: ours where a family describes it, else diffusers' own."""

from __future__ import annotations

from typing import Any

from .pipeline import Pipeline
from .settings import ModelSettings
from .without_spec import pipeline_without_spec


def load_pipeline(settings: ModelSettings, **options: Any) -> Any:
    """What samples, encodes and decodes for a model; `options` are those of `Pipeline.load`, and so is what it raises."""
    if pipeline_without_spec(settings.model) is None:
        return Pipeline.load(settings, **options)
    from .own_pipeline import DiffusersPipeline  # with all that diffusers' pipelines import

    return DiffusersPipeline.load(settings, **options)
