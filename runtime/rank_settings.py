"""What a sidecar keeps between prompts, and what each of its ranks is told at its start."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field, ValidationInfo, field_validator

from .errors import in_our_words, shown
from .settings import AUTO, ParallelSettings, Settings

AUTO_PART = 0.7
"""So much of the memory that is free without them may loaded models take; the rest is for what a step works with."""
UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
VARIABLES = {
    "device": "OUTRIGGER_KEEP_DEVICE",
    "host": "OUTRIGGER_KEEP_HOST",
    "prompts": "OUTRIGGER_KEEP_PROMPTS",
    "idle_minutes": "OUTRIGGER_IDLE_MINUTES",
}
"""The environment variable of each field."""

_BYTES = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?([KMGT])i?B", re.IGNORECASE | re.ASCII)
_MINUTES = re.compile(r"[0-9]{1,7}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}")
_PART = re.compile(r"0?\.[0-9]{1,6}|[01]\.0*")


class KeepSettings(Settings):
    """What stays loaded while no prompt runs.

    `device` and `host` are how much loaded models may take of each GPU and of host memory: "auto", a part of what is free
    without them such as "0.5" ("1.0" for all of it), or an amount such as "20GB"; "0" keeps the model in use alone. That
    one is kept whatever it takes. `prompts` is how much encoded prompts may take, "0" for none. After `idle_minutes` without
    a job everything is let go of; 0 is never.
    """

    device: str = AUTO
    host: str = AUTO
    prompts: str = "256MB"
    idle_minutes: float = Field(default=60.0, ge=0.0, le=1e6, allow_inf_nan=False)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str], **given: str) -> KeepSettings:
        """Those that are given, and those of the variables that are set. Raises `ValueError` in the user's words."""
        found = {field: variables[name] for field, name in VARIABLES.items() if variables.get(name)}
        return in_our_words(cls, **{**found, **given})

    @field_validator("device", "host", "prompts")
    @classmethod
    def _known_amount(cls, text: str, info: ValidationInfo) -> str:
        text, limited = text.strip(), info.field_name != "prompts"
        if _BYTES.fullmatch(text) or text == "0" or (limited and (text == AUTO or _PART.fullmatch(text))):
            return text
        parts = "auto, a part such as 0.5 (1.0 for all that is free), " if limited else ""
        raise ValueError(
            f"{VARIABLES[info.field_name]} {shown(text)} is not one of: {parts}an amount such as 20GB or 512MB, or 0"
        )

    @field_validator("idle_minutes", mode="before")
    @classmethod
    def _known_minutes(cls, value: object) -> object:
        """Minutes from an environment are a text."""
        if not isinstance(value, str):
            return value
        if not _MINUTES.fullmatch(value.strip()):
            raise ValueError(
                f"{VARIABLES['idle_minutes']} {shown(value)} is not a number of minutes such as 60 or 0.5, or 0 for never"
            )
        return float(value)

    @property
    def prompt_bytes(self) -> int:
        """How much encoded prompts may take."""
        return limit_of(self.prompts, free=0)


def limit_of(amount: str, *, free: int) -> int:
    """The bytes of an amount, a part of what is `free`, or "auto"."""
    if found := _BYTES.fullmatch(amount):
        return int(float(found[1]) * UNITS[f"{found[2].upper()}B"])
    return int((AUTO_PART if amount == AUTO else float(amount)) * free)


class RankSettings(Settings):
    """What a rank is told at its start, as one line of JSON on its standard input.

    `endpoint`, `identity` and `token` lead to the server; `store` is the file where the ranks meet; `pool` names the
    sidecar's folder of shared memory, empty for none. `devices` holds one device for each rank, as the rank sees them, `names`
    what the user calls them, and `parallel` the degrees of their mesh. `keep` is what stays loaded.
    """

    rank: int = Field(ge=0)
    devices: tuple[str, ...] = Field(min_length=1)
    names: tuple[str, ...] = ()
    parallel: ParallelSettings
    endpoint: str
    identity: str
    token: str
    store: str
    pool: str = ""
    keep: KeepSettings = KeepSettings()

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    @property
    def device(self) -> str:
        """This rank's own device."""
        return self.devices[self.rank]

    @property
    def device_name(self) -> str:
        """What the user calls it: of cuda:2,3 the first rank sees its own as cuda:0."""
        return self.names[self.rank] if self.names else self.device
