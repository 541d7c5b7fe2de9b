"""ComfyUI's dicts to the sidecar's messages and back. What cannot be honoured is refused by name, never dropped."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.errors import in_our_words
from ..runtime.protocol import ITEM_BYTES, MAX_ENTRIES, Conditioning
from . import host

TENSORS = {"pooled_output": "pooled", "attention_mask": "attention_mask", "mask": "mask"}
NUMBERS = ("guidance", "strength", "mask_strength", "start_percent", "end_percent")
AREA_KEYS = ("area", "set_area_to_bounds", "clip_start_percent", "clip_end_percent", "default")
"""Keys that become other fields of a `Conditioning`; `TENSORS` and `NUMBERS` go over as they are."""

HONOURED = (*TENSORS, *NUMBERS, *AREA_KEYS)
WITHOUT_EFFECT = (
    "width", "height", "crop_w", "crop_h", "target_width", "target_height", "aesthetic_score", "prompt_type",
    "control_apply_to_uncond",
)  # fmt: skip
"""Keys that change nothing without another key, or for the models that run here (KSampler ignores them as well)."""

WAY_OUT = {
    "control": "remove Apply ControlNet",
    "gligen": "remove GLIGEN",
    "hooks": "remove the hook nodes",
    "concat_latent_image": "use a text-to-video graph: image-to-video and inpainting models do not run here yet",
    "reference_latents": "remove Reference Latent",
    "clip_vision_output": "use a text-to-video graph: image-to-video models do not run here yet",
}
PERCENT = "percentage"
DOWNSCALE_KEYS = ("downscale_ratio_spacial", "downscale_ratio_temporal")


def to_conditioning(value: Any, what: str) -> tuple[Conditioning, ...]:
    """A CONDITIONING socket's value as messages. `what` names the input. Raises `ValueError` for what is not honoured."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{what}: connect a text encoder; this CONDITIONING is empty")
    if len(value) > MAX_ENTRIES:
        raise ValueError(f"{what}: combine {MAX_ENTRIES} prompts at most; this CONDITIONING has {len(value)}")
    return tuple(_entry(embedding, options, what) for embedding, options in value)


def _entry(embedding: torch.Tensor | None, options: dict[str, Any], what: str) -> Conditioning:
    """One entry of a CONDITIONING as a message."""
    _refuse_unhonoured(options, what)
    if embedding is None:
        raise ValueError(f"{what}: connect a text encoder; this CONDITIONING carries no embedding")
    present = {key: value for key, value in options.items() if value is not None}
    fields = {field: _to_send(present[key], what) for key, field in TENSORS.items() if key in present}
    fields |= {key: float(present[key]) for key in NUMBERS if key in present}
    fields |= _area(present.get("area"), what)
    if "clip_start_percent" in present:
        fields["start_percent"] = max(float(present["clip_start_percent"]), fields.get("start_percent", 0.0))
        fields["end_percent"] = min(float(present.get("clip_end_percent", 1.0)), fields.get("end_percent", 1.0))
    try:
        return in_our_words(
            Conditioning,
            embedding=_to_send(embedding, what),
            area_from_mask="mask" in present and bool(present.get("set_area_to_bounds")),
            default="default" in present,
            **fields,
        )
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _area(area: Any, what: str) -> dict[str, tuple]:
    """The fields of an area: latent pixels, or parts of the latent behind the word "percentage"."""
    if area is None:
        return {}
    try:
        if area[0] == PERCENT:
            return {"area_percent": tuple(float(part) for part in area[1:])}
        return {"area": tuple(int(size) for size in area)}
    except (TypeError, ValueError, IndexError):
        raise ValueError(f"{what}: set the area again: this CONDITIONING carries the area {area!r}") from None


def from_conditioning(conditioning: Conditioning) -> list[list[Any]]:
    """An encoded prompt as ComfyUI's CONDITIONING: `[[embedding, options]]`."""
    options = {
        "pooled_output": conditioning.pooled,
        "attention_mask": conditioning.attention_mask,
        "guidance": conditioning.guidance,
    }
    return [[conditioning.embedding, {key: value for key, value in options.items() if value is not None}]]


def to_latent(value: Any, what: str) -> torch.Tensor:
    """The tensor of a LATENT, ready to send: `(B, C, H, W)` or `(B, C, F, H, W)`."""
    latent = value.get("samples") if isinstance(value, dict) else None
    if latent is None:
        raise ValueError(f"{what}: connect a latent; this input holds {type(value).__name__}, not a LATENT")
    if getattr(latent, "is_nested", False):
        raise ValueError(f"{what}: use a latent of pictures alone; this one holds several tensors (video with sound)")
    if latent.ndim not in (4, 5):
        raise ValueError(f"{what}: use a latent of pictures or video; this one has the shape {tuple(latent.shape)}")
    if 0 in (*latent.shape[:2], *latent.shape[-2:]):
        raise ValueError(f"{what}: use a latent with something in it; this one has the shape {tuple(latent.shape)}")
    return _to_send(latent, what)


def noise_mask(value: dict[str, Any], what: str) -> torch.Tensor | None:
    """The mask of a LATENT, 1 where it is painted anew, ready to send; None for none."""
    mask = value.get("noise_mask")
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ValueError(f"{what}: set the noise mask again: this latent carries a {type(mask).__name__} for one")
    if mask is not None and not mask.numel():
        raise ValueError(f"{what}: set the noise mask again: this one has the shape {tuple(mask.shape)}")
    return _to_send(mask, what)


def to_sigmas(value: torch.Tensor | None, what: str) -> torch.Tensor | None:
    """A SIGMAS socket's value, ready to send; None for none."""
    if value is not None and not isinstance(value, torch.Tensor):
        raise ValueError(f"{what}: connect a scheduler; this input holds {type(value).__name__}, not SIGMAS")
    return _to_send(value, what)


def to_noise(value: Any, latent: dict[str, Any], what: str) -> torch.Tensor | None:
    """What a NOISE socket's object draws for a LATENT, ready to send; None for none."""
    if value is None:
        return None
    if not hasattr(value, "generate_noise"):
        raise ValueError(f"{what}: connect a noise node; this input holds {type(value).__name__}, not NOISE")
    noise = value.generate_noise(latent)
    if getattr(noise, "is_nested", False):
        raise ValueError(f"{what}: use the noise of pictures alone; this one holds several tensors (video with sound)")
    return _to_send(noise, what)


def batch_index(value: dict[str, Any]) -> tuple[int, ...] | None:
    """Whose noise of the batch each item of a LATENT gets; None for their own."""
    indices = value.get("batch_index")
    return None if indices is None else tuple(int(index) for index in indices)


def downscale(value: dict[str, Any]) -> tuple[int | None, int | None]:
    """How far (in space, in time) the VAE scales down that an empty LATENT was made for; newer ComfyUI notes it there."""
    spatial, temporal = (value.get(key) for key in DOWNSCALE_KEYS)
    return spatial, temporal


def from_latent(latent: torch.Tensor, like: dict[str, Any]) -> dict[str, Any]:
    """A LATENT with this tensor; other keys of the one it was made from are kept, as KSampler keeps them."""
    kept = {key: value for key, value in like.items() if key not in DOWNSCALE_KEYS}
    return {**kept, "samples": host.to_intermediate(latent)}


def from_images(images: torch.Tensor) -> torch.Tensor:
    """Pictures as ComfyUI's IMAGE."""
    return host.to_intermediate(images)


def _refuse_unhonoured(options: dict[str, Any], what: str) -> None:
    for key, value in options.items():
        if key in HONOURED or key in WITHOUT_EFFECT or value is None:
            continue
        way_out = WAY_OUT.get(key, "connect the conditioning as it was before the node that adds this")
        shown = f" ({value})" if isinstance(value, (int, float, str)) else ""
        raise ValueError(f"{what}: {way_out}: this CONDITIONING carries {key!r}{shown}, which Outrigger does not apply")


def _to_send(tensor: torch.Tensor | None, what: str) -> torch.Tensor | None:
    """The tensor as it can travel: on the processor, in one piece."""
    if tensor is None:
        return None
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise ValueError(f"{what}: convert the tensor to float32: {tensor.dtype} does not travel to the sidecar")
    return tensor.detach().cpu().contiguous()
