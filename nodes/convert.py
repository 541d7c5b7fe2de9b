"""ComfyUI's dicts to the sidecar's messages and back. What cannot be honoured is refused by name, never dropped."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.errors import in_our_words, shown
from ..runtime.protocol import ITEM_BYTES, MAX_ENTRIES, Conditioning
from ..runtime.settings import ModelSettings
from . import host

TENSORS = {
    "pooled_output": "pooled",
    "attention_mask": "attention_mask",
    "conditioning_byt5small": "second_embedding",
    "mask": "mask",
    "concat_latent_image": "concat_latent",
    "concat_mask": "concat_mask",
}
NUMBERS = ("guidance", "frame_rate", "strength", "mask_strength", "start_percent", "end_percent")
AREA_KEYS = ("area", "set_area_to_bounds", "clip_start_percent", "clip_end_percent", "default")
"""Keys that become other fields of a `Conditioning`; `TENSORS` and `NUMBERS` go over as they are."""

REFERENCE_KEYS = ("reference_latents", "reference_latents_method")

VISION = "clip_vision_output"
VISION_STATES = {"clip_vision": "penultimate_hidden_states", "clip_vision_last": "last_hidden_state"}
"""Key of what CLIP Vision Encode says, and the parts of it that models read."""

HONOURED = (*TENSORS, *NUMBERS, *AREA_KEYS, *REFERENCE_KEYS, VISION)
WITHOUT_EFFECT = (
    "width", "height", "crop_w", "crop_h", "target_width", "target_height", "aesthetic_score", "prompt_type",
    "control_apply_to_uncond",
)  # fmt: skip
"""Keys that change nothing without another key, or for the models that run here, as for KSampler; they are told of."""

WAY_OUT = {
    "control": "remove Apply ControlNet",
    "gligen": "remove GLIGEN",
    "hooks": "remove the hook nodes",
}
PERCENT = "percentage"
DOWNSCALE_KEYS = ("downscale_ratio_spacial", "downscale_ratio_temporal")


def to_model(value: Any) -> ModelSettings:
    """An OUTRIGGER_MODEL socket's value. Raises `ValueError` for anything else."""
    if not isinstance(value, ModelSettings):
        raise ValueError(f"model: connect Outrigger Load Model; {_held(value)}, not a model of Outrigger")
    return value


def to_conditioning(value: Any, what: str) -> tuple[Conditioning, ...]:
    """A CONDITIONING socket's value as messages. `what` names the input. Raises `ValueError` for what is not honoured."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{what}: connect a text encoder; {_held(value)}, not a CONDITIONING with an entry")
    if len(value) > MAX_ENTRIES:
        raise ValueError(f"{what}: combine {MAX_ENTRIES} prompts at most; this CONDITIONING has {len(value)}")
    return tuple(_entry(entry, what) for entry in value)


def without_effect(value: Any, what: str) -> str:
    """What a CONDITIONING carries that changes nothing, such as the sizes of CLIP Text Encode SDXL, in words; else empty."""
    carried = {key: None for _, options in value for key in WITHOUT_EFFECT if options.get(key) is not None}
    return f"{what}: {', '.join(carried)} without effect: no model that runs here reads that" if carried else ""


def has_no_embedding(value: Any, what: str) -> bool:
    """Whether a CONDITIONING is `[[None, {...}]]`, which stands for no prompt. Raises `ValueError` for what is not honoured."""
    if not isinstance(value, (list, tuple)) or len(value) != 1 or not isinstance(value[0], (list, tuple)):
        return False
    embedding, options = (*value[0], None, None)[:2]
    if embedding is not None or not isinstance(options, dict):
        return False
    _refuse_unhonoured(options, what)
    return True


def _entry(entry: Any, what: str) -> Conditioning:
    """One entry of a CONDITIONING, `[embedding, options]`, as a message."""
    if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[1], dict):
        raise ValueError(f"{what}: connect a text encoder; an entry of this CONDITIONING is {shown(entry)}")
    embedding, options = entry
    _refuse_unhonoured(options, what)
    if embedding is None:
        raise ValueError(f"{what}: connect a text encoder; this CONDITIONING carries no embedding")
    present = {key: value for key, value in options.items() if value is not None}
    fields: dict[str, Any] = {"embedding": _to_send(embedding, what)}
    fields |= {field: _to_send(present[key], f"{what}: {key}") for key, field in TENSORS.items() if key in present}
    fields |= {key: _number(present[key], key, what) for key in NUMBERS if key in present}
    fields |= _references(present, what) | _clip_vision(present, what)
    fields |= _area(present.get("area"), what) | _period(present, fields, what)
    to_bounds = _number(present.get("set_area_to_bounds", 0), "set_area_to_bounds", what)
    fields |= {"area_from_mask": "mask" in present and to_bounds != 0, "default": "default" in present}
    if fields["area_from_mask"] and fields["mask"].ndim > 1:
        fields["mask_spans"] = _spans(fields["mask"])
    try:
        return in_our_words(Conditioning, **fields)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _spans(mask: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where what a mask holds starts and ends, along its last two dims; nowhere in an empty one."""
    filled = mask.ne(0)
    return tuple(_span(filled.movedim(dim, 0).flatten(1).any(1).nonzero()) for dim in (-2, -1))


def _span(places: torch.Tensor) -> tuple[int, int]:
    """From the first of these places to behind the last."""
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _references(present: dict[str, Any], what: str) -> dict[str, Any]:
    """The fields of the reference latents, and of the way they are placed."""
    latents = present.get("reference_latents", [])
    if not isinstance(latents, (list, tuple)):
        raise ValueError(f"{what}: connect Reference Latent again; {_held(latents)} in reference_latents")
    return {
        "references": tuple(_to_send(latent, f"{what}: reference_latents") for latent in latents),
        "reference_method": str(present.get("reference_latents_method", "")),
    }


def _clip_vision(present: dict[str, Any], what: str) -> dict[str, Any]:
    """The fields of what a CLIP vision model says of a picture."""
    if VISION not in present:
        return {}
    states = {field: getattr(present[VISION], part, None) for field, part in VISION_STATES.items()}
    said = {field: _to_send(each, f"{what}: {VISION}") for field, each in states.items() if each is not None}
    if not said:
        raise ValueError(f"{what}: connect CLIP Vision Encode again: {_held(present[VISION])} in {VISION}")
    return said


def _period(present: dict[str, Any], fields: dict[str, Any], what: str) -> dict[str, float]:
    """Start and end, where a text encoder node has set its own: what both leave."""
    if "clip_start_percent" not in present:
        return {}
    start = _number(present["clip_start_percent"], "clip_start_percent", what)
    end = _number(present.get("clip_end_percent", 1.0), "clip_end_percent", what)
    return {
        "start_percent": max(start, fields.get("start_percent", 0.0)),
        "end_percent": min(end, fields.get("end_percent", 1.0)),
    }


def _number(value: Any, name: str, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{what}: set {name} again: this CONDITIONING carries {shown(value)} for it") from None


def _area(area: Any, what: str) -> dict[str, tuple]:
    """The fields of an area: latent pixels, or parts of the latent behind the word "percentage"."""
    if area is None:
        return {}
    try:
        if area[0] == PERCENT:
            return {"area_percent": tuple(float(part) for part in area[1:])}
        return {"area": tuple(int(size) for size in area)}
    except (TypeError, ValueError, RuntimeError, LookupError, OverflowError):
        raise ValueError(f"{what}: set the area again: this CONDITIONING carries the area {shown(area)}") from None


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
    if getattr(latent, "is_nested", False):
        raise ValueError(f"{what}: use a latent of pictures alone; this one holds several tensors (video with sound)")
    if not isinstance(latent, torch.Tensor):
        raise ValueError(f"{what}: connect a latent; {_held(value)}, not a LATENT")
    if latent.ndim not in (4, 5):
        raise ValueError(f"{what}: use a latent of pictures or video; this one has the shape {tuple(latent.shape)}")
    if 0 in (*latent.shape[:2], *latent.shape[-2:]):
        raise ValueError(f"{what}: use a latent with something in it; this one has the shape {tuple(latent.shape)}")
    return _to_send(latent, what)


def noise_mask(value: dict[str, Any], what: str) -> torch.Tensor | None:
    """The mask of a LATENT, 1 where it is painted anew, ready to send; None for none."""
    mask = value.get("noise_mask")
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"{what}: set the noise mask again: this latent carries a {type(mask).__name__} for one")
    if not mask.numel():
        raise ValueError(f"{what}: set the noise mask again: this one has the shape {tuple(mask.shape)}")
    return _to_send(mask, what)


def to_sigmas(value: torch.Tensor | None, what: str) -> torch.Tensor | None:
    """A SIGMAS socket's value, ready to send; None for none."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what}: connect a scheduler; {_held(value)}, not SIGMAS")
    return _to_send(value, what)


def to_noise(value: Any, latent: dict[str, Any], what: str) -> torch.Tensor | None:
    """What a NOISE socket's object draws for a LATENT, ready to send; None for none."""
    if value is None:
        return None
    if not hasattr(value, "generate_noise"):
        raise ValueError(f"{what}: connect a noise node; {_held(value)}, not NOISE")
    noise = value.generate_noise(latent)
    if getattr(noise, "is_nested", False):
        raise ValueError(f"{what}: use the noise of pictures alone; this one holds several tensors (video with sound)")
    return _to_send(noise, what)


def batch_index(value: dict[str, Any], what: str) -> tuple[int, ...] | None:
    """Whose noise of the batch each item of a LATENT gets; None for their own."""
    indices = value.get("batch_index")
    if indices is None:
        return None
    try:
        return tuple(int(index) for index in indices)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{what}: take the items of the batch again: this latent carries the batch_index {shown(indices)}"
        ) from None


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


def to_pixels(value: Any, what: str) -> torch.Tensor:
    """The tensor of an IMAGE, ready to send: `(N, H, W, 3)`, without transparency."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what}: connect a picture; {_held(value)}, not an IMAGE")
    if value.ndim != 4 or value.shape[-1] < 3 or not value.numel():
        raise ValueError(f"{what}: use pictures with three colours; this IMAGE has the shape {tuple(value.shape)}")
    if not value.is_floating_point():
        raise ValueError(f"{what}: divide by 255: an IMAGE has numbers from 0 to 1; this one is of {value.dtype}")
    return _to_send(value, what)[..., :3].contiguous()


def _refuse_unhonoured(options: dict[str, Any], what: str) -> None:
    for key, value in options.items():
        if key == "guidance" and value is None:
            raise ValueError(
                f"{what}: remove Flux Disable Guidance: this CONDITIONING carries 'guidance' None, no guidance"
            )
        if key in HONOURED or key in WITHOUT_EFFECT or value is None:
            continue
        way_out = WAY_OUT.get(key, "connect the conditioning as it was before the node that adds this")
        shown = f" ({value})" if isinstance(value, (int, float, str)) else ""
        raise ValueError(f"{what}: {way_out}: this CONDITIONING carries {key!r}{shown}, which Outrigger does not apply")


def _held(value: Any) -> str:
    return f"this input holds {'nothing' if value is None else type(value).__name__}"


def _to_send(tensor: Any, what: str) -> torch.Tensor:
    """The tensor as it can travel: on the processor, in one piece."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what}: make it again: there is a {type(tensor).__name__} where a tensor should be")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{what}: make it again: this tensor is {'empty' if tensor.is_meta else 'sparse'}")
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise ValueError(f"{what}: convert the tensor to float32: {tensor.dtype} does not travel to the sidecar")
    return tensor.detach().cpu().contiguous()
