"""ComfyUI's dicts to the sidecar's messages and back. What cannot be honoured is refused by name, never dropped."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.protocol import ITEM_BYTES, Conditioning
from . import host

HONOURED = ("pooled_output", "attention_mask", "guidance")
WITHOUT_EFFECT = (
    "width", "height", "crop_w", "crop_h", "target_width", "target_height", "aesthetic_score", "prompt_type",
    "mask_strength", "set_area_to_bounds", "control_apply_to_uncond",
)  # fmt: skip
"""Keys that change nothing without another key, or for the models that run here (KSampler ignores them as well)."""

NEUTRAL = {
    "strength": 1.0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "clip_start_percent": 0.0,
    "clip_end_percent": 1.0,
    "default": False,
}
"""Keys that change nothing while they have this value."""

WAY_OUT = {
    "strength": "set the strength to 1",
    "area": "remove the node that sets the area",
    "mask": "remove the node that sets the mask",
    "start_percent": "remove Set Timestep Range",
    "end_percent": "remove Set Timestep Range",
    "control": "remove Apply ControlNet",
    "gligen": "remove GLIGEN",
    "hooks": "remove the hook nodes",
    "concat_latent_image": "use a text-to-video graph: image-to-video and inpainting models do not run here yet",
    "reference_latents": "remove Reference Latent",
    "clip_vision_output": "use a text-to-video graph: image-to-video models do not run here yet",
}
DOWNSCALE_KEYS = ("downscale_ratio_spacial", "downscale_ratio_temporal")


def to_conditioning(value: Any, what: str) -> tuple[Conditioning, ...]:
    """A CONDITIONING socket's value as messages. `what` names the input. Raises `ValueError` for what is not honoured."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{what}: connect a text encoder; this CONDITIONING is empty")
    if len(value) > 1:
        raise ValueError(
            f"{what}: use one prompt in place of {len(value)} combined ones "
            f"(Conditioning Combine, or a prompt with a schedule): Outrigger samples with one entry"
        )
    embedding, options = value[0]
    _refuse_unhonoured(options, what)
    if embedding is None:
        raise ValueError(f"{what}: connect a text encoder; this CONDITIONING carries no embedding")
    guidance = options.get("guidance")
    return (
        Conditioning(
            embedding=_to_send(embedding, what),
            pooled=_to_send(options.get("pooled_output"), what),
            attention_mask=_to_send(options.get("attention_mask"), what),
            guidance=None if guidance is None else float(guidance),
        ),
    )


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
    return _to_send(latent, what)


def refuse_noise_mask(value: Any) -> None:
    """Raises `ValueError` when a LATENT carries a mask, which the sampler does not honour yet."""
    if isinstance(value, dict) and value.get("noise_mask") is not None:
        raise ValueError(
            "latent_image: remove Set Latent Noise Mask (or VAE Encode for Inpainting): this latent carries a "
            "noise_mask, and Outrigger does not sample behind a mask yet"
        )


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
        if key in NEUTRAL and value == NEUTRAL[key]:
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
