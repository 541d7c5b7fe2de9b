"""What messages are made of: their base, tensors, and an entry of conditioning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 320
MAX_TENSOR_BYTES = 1 << 36
MAX_DIMS = 8
MAX_REFERENCES = 8
READ = (
    *("embedding", "second_embedding", "pooled", "attention_mask"),
    *("concat_latent", "clip_vision", "clip_vision_last", "noise_levels"),
)
REFERENCE = "reference "

ITEM_BYTES = {
    "float32": 4, "float64": 8, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
"""The number formats that travel, by torch's name, and the bytes of one number."""


class Message(BaseModel):
    """Base of everything on the wire: immutable, strict, an unknown field is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)


class TensorRef(Message):
    """Where a tensor's bytes are: frame number `frame`, or slot `segment` of the sender's pool of shared memory.

    Raises `ValueError` when dtype, shape and size do not add up, so nothing is allocated for a reference that lies.
    """

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(max_length=MAX_DIMS)
    nbytes: int = Field(ge=0, le=MAX_TENSOR_BYTES)
    frame: int | None = Field(default=None, ge=1, le=MAX_TENSORS)
    segment: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,80}$")

    @model_validator(mode="after")
    def _adds_up(self) -> TensorRef:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if expected != self.nbytes:
            raise ValueError(f"a {self.dtype} tensor of shape {self.shape} has {expected} bytes, not {self.nbytes}")
        if (self.frame is None) == (self.segment is None):
            raise ValueError("a tensor is either in a frame or in a segment")
        return self


def _tensor_or_ref(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorRef.model_validate(value)
    if isinstance(value, TensorRef) or type(value).__module__.startswith("torch"):
        return value
    raise ValueError(f"expected a tensor, got {type(value).__name__}")


Tensor = Annotated[Any, PlainValidator(_tensor_or_ref)]
"""A torch tensor, or a `TensorRef` where the bytes are not looked at."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Span = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class Conditioning(Message):
    """One entry of ComfyUI's CONDITIONING: what the model reads, where it counts and when.

    `embedding` is `(B, L, D)`; `pooled` is `(B, D)`; `attention_mask` is `(B, L)`; `second_embedding`, `(B, tokens, D)`, is what
    a second encoder says of a part of the prompt, such as of what stands in quotation marks. `references` are latents in the VAE's
    own space that the model looks at beside the prompt, and `reference_method` is where they stand, empty for the model's
    own choice. `concat_latent` is a latent in the VAE's own space that is put beside the noisy one, channel by channel, and
    `concat_mask`, `(B, 1, H, W)` of any resolution, is 1 where it is painted anew; for a video it is `(B, 1 or 4, F, H, W)`.
    `clip_vision` is what a CLIP vision model says of a picture before its last layer, `(B, tokens, D)`, and `clip_vision_last`
    behind it. `noise_levels`, `(B, F, H, W)` or
    with sides of 1, is worked out from the noise mask: which part of the noise each frame or place has. `frame_rate` is that
    of the video.

    `area` is a size and then an offset for each dim, in latent pixels: `(H, W, Y, X)`, or `(F, H, W, Z, Y, X)` for video;
    `area_percent` is the same in parts of the latent, and stands in the place of `area`. `mask` is `(H, W)`, `(N, H, W)`
    or `(N, F, H, W)`, of any resolution. With `area_from_mask` what holds all of it is the area; `mask_spans` say where that
    starts and ends in the mask, its rows and its columns, for those that plan without reading it. From `start_percent` to
    `end_percent` of the way the entry is used. A `default` entry fills what the others of its side leave over.
    """

    embedding: Tensor
    second_embedding: Tensor | None = None
    pooled: Tensor | None = None
    attention_mask: Tensor | None = None
    guidance: Finite | None = None
    references: tuple[Tensor, ...] = Field(default=(), max_length=MAX_REFERENCES)
    reference_method: str = Field(default="", max_length=64)
    concat_latent: Tensor | None = None
    concat_mask: Tensor | None = None
    clip_vision: Tensor | None = None
    clip_vision_last: Tensor | None = None
    noise_levels: Tensor | None = None
    frame_rate: Finite | None = None
    strength: Finite = 1.0
    area: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, max_length=MAX_DIMS)
    area_percent: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None = Field(default=None, max_length=MAX_DIMS)
    mask: Tensor | None = None
    mask_strength: Finite = 1.0
    area_from_mask: bool = False
    mask_spans: tuple[Span, Span] | None = None
    start_percent: Finite | None = None
    end_percent: Finite | None = None
    default: bool = False

    @property
    def text_tokens(self) -> int:
        """How many tokens a model that reads all of it has beside those of the latent."""
        read = (self.embedding, self.second_embedding, self.clip_vision_last)
        return sum(each.shape[1] for each in read if each is not None)

    def tensors(self) -> dict[str, Any]:
        """What the model reads of it for each item of a batch, by name."""
        named = {name: tensor for name in READ if (tensor := getattr(self, name)) is not None}
        return named | {f"{REFERENCE}{number}": tensor for number, tensor in enumerate(self.references)}

    def with_tensors(self, tensors: Mapping[str, Any]) -> Conditioning:
        """The same with other tensors, under the names that `tensors` gives."""
        named = {name: tensor for name, tensor in tensors.items() if not name.startswith(REFERENCE)}
        references = tuple(tensor for name, tensor in tensors.items() if name.startswith(REFERENCE))
        return self.model_copy(update={**named, "references": references})

    @model_validator(mode="after")
    def _area_fits(self) -> Conditioning:
        for area in (self.area, self.area_percent):
            if area is not None and len(area) not in (4, 6):
                raise ValueError(f"an area has 4 or 6 numbers, a size and an offset for each dim, not {len(area)}")
        if self.default and (self.area or self.area_percent or self.area_from_mask):
            raise ValueError(
                "a default conditioning fills what the others leave over, so it cannot have an area: remove it"
            )
        return self
