"""Prompts for the tests: the shipped template in API form, with other values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

WORKFLOWS = Path(__file__).resolve().parents[1] / "workflows"
PLAN, MODEL, POSITIVE, NEGATIVE, SIZE, SAMPLER, DECODE, SAVE = "1", "2", "3", "4", "5", "6", "7", "8"

Prompt = dict[str, Any]


def template(name: str) -> Prompt:
    """A shipped workflow in API form."""
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def changed(prompt: Prompt, **inputs: dict[str, Any]) -> Prompt:
    """The prompt with other values: `changed(prompt, SAMPLER={"seed": 2})`."""
    prompt = copy.deepcopy(prompt)
    for node, values in inputs.items():
        prompt[globals()[node]]["inputs"].update(values)
    return prompt


def picture(**inputs: dict[str, Any]) -> Prompt:
    """One small picture in few steps, on two ranks."""
    return changed(changed(template("text_to_image"), SAMPLER={"steps": 4}), **inputs)


def slow(**inputs: dict[str, Any]) -> Prompt:
    """A run long enough to be cancelled or killed in its middle; only its latent is saved."""
    size = {"width": 256, "height": 256, "length": 17}
    prompt = changed(template("text_to_image"), SIZE=size, SAMPLER={"steps": 40})
    del prompt[DECODE]
    prompt[SAVE] = {"class_type": "SaveLatent", "inputs": {"samples": [SAMPLER, 0], "filename_prefix": "slow"}}
    return changed(prompt, **inputs)
