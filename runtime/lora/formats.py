"""How files name what they hold: each key is a layer and the role that a tensor plays there.

The layouts are those of kohya (sd-scripts, musubi-tuner), PEFT and diffusers, ai-toolkit, xlabs, LyCORIS
(arXiv:2309.14859) and the full differences that extracted LoRAs carry.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

BIAS = "bias difference"
_ROLES = (
    (r"\.lora_down\.weight|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight|\.lora_A(\.(?!bias$)\w+)?(\.weight)?", "down"),
    (r"\.lora_up\.weight|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight|\.lora_B(\.(?!bias$)\w+)?(\.weight)?", "up"),
    (r"(?<=_lora[12])\.down\.weight", "down"),
    (r"(?<=_lora[12])\.up\.weight", "up"),
    (r"\.alpha", "alpha"),
    (r"\.dora_scale", "magnitude"),
    (r"\.lora_magnitude_vector(\.\w+)?(\.weight)?", "magnitude_of_sum"),
    (r"\.hada_w1_a", "hada_w1_a"),
    (r"\.hada_w1_b", "hada_w1_b"),
    (r"\.hada_w2_a", "hada_w2_a"),
    (r"\.hada_w2_b", "hada_w2_b"),
    (r"\.lokr_w1", "lokr_w1"),
    (r"\.lokr_w1_a", "lokr_w1_a"),
    (r"\.lokr_w1_b", "lokr_w1_b"),
    (r"\.lokr_w2", "lokr_w2"),
    (r"\.lokr_w2_a", "lokr_w2_a"),
    (r"\.lokr_w2_b", "lokr_w2_b"),
    (r"\.diff|\.w_norm", "difference"),
    (r"\.diff_b|\.b_norm", BIAS),
    (r"\.set_weight", "value"),
    (r"\.lora_mid\.weight|\.hada_t[12]|\.lokr_t2", "Tucker"),
    (r"\.oft_blocks|\.oft_diag|\.rescale", "OFT"),
    (r"\.[ab][12]\.weight", "GLoRA"),
    (r"\.reshape_weight", "widened"),
)  # fmt: skip
_KEY = re.compile(
    r"(?P<layer>.+?)(?:" + "|".join(f"(?P<role_{n}>{pattern})" for n, (pattern, _) in enumerate(_ROLES)) + ")"
)
REFUSED_ROLES = {
    "Tucker": "a Tucker decomposition of a convolution",
    "OFT": "OFT (rotations of a weight)",
    "GLoRA": "GLoRA",
    "widened": "a control LoRA, which gives the model more input channels",
}
"""Roles of kinds that are told apart but not applied."""
_SCALES = {"alpha", "magnitude", "magnitude_of_sum"}
"""Roles of what another tensor is multiplied by."""
TEXT_ENCODER = re.compile(r"lora_te\d*_|text_encoders?(_\d)?[._]|te\d?[._]|clip_[lg]\.")
"""How keys for a text encoder begin."""

Roles = Mapping[str, str]
"""The key of the file for each role of a layer."""


def split_key(key: str) -> tuple[str, str] | None:
    """Layer and role of a key: `blocks.0.ffn.0`, `down`. None for a key of no known role."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    role = next(name for name, value in found.groupdict().items() if value and name.startswith("role_"))
    return found["layer"], _ROLES[int(role.removeprefix("role_"))][1]


def group_keys(keys: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The roles of each layer, and the keys of no known role, or of one that another adapter in the file has already."""
    layers: dict[str, dict[str, str]] = {}
    unknown = []
    for key in sorted(keys):
        split = split_key(key)
        layer, role = split or ("", "")
        if role and role not in layers.get(layer, {}):
            layers.setdefault(layer, {})[role] = key
        else:
            unknown.append(key)
    return layers, unknown


def unread_roles(roles: Collection[str]) -> set[str]:
    """Of the roles of a layer those that count for nothing: it has a stronger one, as in ComfyUI, or nothing to scale."""
    own = {*roles} - {BIAS}
    if own <= _SCALES:
        return own
    return next((own - {strong} for strong in ("value", "difference") if strong in own), set())


def summary(keys: Iterable[str]) -> str:
    """Keys by name, in few words: `blocks.*.diff_m (30)` for those that differ in the number of their block alone."""
    alike: dict[str, list[str]] = {}
    for key in sorted(keys):
        alike.setdefault(re.sub(r"(?<=[._])\d+(?=[._])", "*", key, count=1), []).append(key)
    return ", ".join(each[0] if len(each) == 1 else f"{name} ({len(each)})" for name, each in alike.items())
