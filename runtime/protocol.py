"""The messages on the wire: requests one way, events the other. Pure data; `channel` moves it.

Tensors stand in the messages as they are. On the wire a `TensorRef` takes a tensor's place in the header, and its bytes
travel beside the header: in a frame, or in a slot of shared memory. A process that only passes messages on (the server)
keeps the references and never makes tensors of them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, model_validator

from .settings import ModelSettings, SampleSettings

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 320
MAX_ENTRIES = 32
MAX_TENSOR_BYTES = 1 << 36
MAX_DIMS = 8

ITEM_BYTES = {
    "float32": 4, "float64": 8, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
"""The number formats that travel, by torch's name, and the bytes of one number."""


class Message(BaseModel):
    """Base of everything on the wire: immutable, strict, an unknown field is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)


class Address(Message):
    """Where a server listens, as it says on its standard output; `token` goes into the client's `Hello`."""

    endpoint: str
    token: str
    pid: int


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

Scale = Annotated[int, Field(ge=1, le=256)] | None
Job = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]


Finite = Annotated[float, Field(allow_inf_nan=False)]


class Conditioning(Message):
    """One entry of ComfyUI's CONDITIONING: what the model reads, where it counts and when.

    `embedding` is `(B, L, D)`; `pooled` is `(B, D)`; `attention_mask` is `(B, L)`.

    `area` is a size and then an offset for each dim, in latent pixels: `(H, W, Y, X)`, or `(F, H, W, Z, Y, X)` for video;
    `area_percent` is the same in parts of the latent, and stands in the place of `area`. `mask` is `(H, W)`, `(N, H, W)`
    or `(N, F, H, W)`, of any resolution. From `start_percent` to `end_percent` of the way the entry is used. A `default`
    entry fills what the others of its side leave over.
    """

    embedding: Tensor
    pooled: Tensor | None = None
    attention_mask: Tensor | None = None
    guidance: float | None = None
    strength: Finite = 1.0
    area: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, max_length=MAX_DIMS)
    area_percent: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None = Field(default=None, max_length=MAX_DIMS)
    mask: Tensor | None = None
    mask_strength: Finite = 1.0
    area_from_mask: bool = False
    start_percent: Finite | None = None
    end_percent: Finite | None = None
    default: bool = False

    @model_validator(mode="after")
    def _area_fits(self) -> Conditioning:
        for area in (self.area, self.area_percent):
            if area is not None and len(area) not in (4, 6):
                raise ValueError(f"an area has 4 or 6 numbers, a size and an offset for each dim, not {len(area)}")
        if self.default and (self.area or self.area_percent or self.area_from_mask):
            raise ValueError("a default conditioning fills what the others leave over, so it cannot have an area: remove it")
        return self


# Requests: node -> server -> every rank ----------------------------------------------------------------------------


class Hello(Message):
    """First message of a connection; the answer is `Welcome`, or `Failed` when version or token differ."""

    kind: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    token: str = Field(default="", max_length=128)


class EncodeText(Message):
    """Encode a prompt with the model's own text encoder. Answered by `Encoded`."""

    kind: Literal["encode_text"] = "encode_text"
    job: Job
    model: ModelSettings
    text: str = Field(max_length=1 << 16)

    def __repr__(self) -> str:
        return f"<EncodeText {self.job}>"  # never the prompt: this text may reach a log

    __str__ = __repr__


class Sample(Message):
    """Denoise a latent. Answered by `Sampled`.

    `latent` is ComfyUI's, `(B, C, H, W)` or `(B, C, F, H, W)`, in the VAE's own space. `batch_index` picks whose noise
    of the batch each item gets. An empty `negative` means that there is none. `preview` asks for a picture each step.
    `cpu_noise_offset` is what the node's ComfyUI adds to the seed of the noise between steps on a CPU (0 before 0.7),
    `downscale` the (spatial, temporal) of the VAE that an empty latent was made for, where that is known.
    `noise_mask` is 1 where the latent is painted anew, of any resolution: `(B, 1, H, W)` or `(B, C, F, H, W)`. `noise`
    stands in the place of the noise that the seed gives, and `sigmas`, `(steps + 1,)`, of the schedule.
    """

    kind: Literal["sample"] = "sample"
    job: Job
    model: ModelSettings
    settings: SampleSettings
    positive: tuple[Conditioning, ...] = Field(min_length=1, max_length=MAX_ENTRIES)
    negative: tuple[Conditioning, ...] = Field(default=(), max_length=MAX_ENTRIES)
    latent: Tensor
    noise_mask: Tensor | None = None
    noise: Tensor | None = None
    sigmas: Tensor | None = None
    batch_index: tuple[Annotated[int, Field(ge=0, le=65535)], ...] | None = None
    preview: bool = False
    cpu_noise_offset: int = Field(default=1, ge=0, le=1)
    downscale: tuple[Scale, Scale] = (None, None)


class Decode(Message):
    """Latent to pictures with the model's own VAE. Answered by `Decoded`."""

    kind: Literal["decode"] = "decode"
    job: Job
    model: ModelSettings
    latent: Tensor


class Cancel(Message):
    """Stop a job at its next step boundary. The job answers with `Stopped` (or its result, if that was quicker)."""

    kind: Literal["cancel"] = "cancel"
    job: Job


class Status(Message):
    """Ask how the sidecar is; answered by `Report` at once, also while a job runs."""

    kind: Literal["status"] = "status"


class Shutdown(Message):
    """End the sidecar and its ranks."""

    kind: Literal["shutdown"] = "shutdown"


Work = Union[EncodeText, Sample, Decode]
Request = Union[Hello, EncodeText, Sample, Decode, Cancel, Status, Shutdown]


# Events: rank -> server -> node ------------------------------------------------------------------------------------


class Welcome(Message):
    """The server is there, and speaks our version. `pool` names its folder of shared memory, empty for none."""

    kind: Literal["welcome"] = "welcome"
    version: int = PROTOCOL_VERSION
    pid: int
    pool: str = Field(default="", pattern=r"^[a-z0-9-]{0,80}$")


class Ready(Message):
    """A rank has joined the others and waits for requests; the server keeps it to itself."""

    kind: Literal["ready"] = "ready"
    pid: int
    token: str = Field(default="", max_length=128)


class Progress(Message):
    """How far a job is. `preview` is `(H, W, 3)` uint8, present only when it was asked for."""

    kind: Literal["progress"] = "progress"
    job: Job
    stage: str = Field(max_length=64)
    step: int = Field(ge=0)
    total: int = Field(ge=0)
    preview: Tensor | None = None


class Notice(Message):
    """Something the user should know: what was chosen and why, or what is slower than it could be."""

    kind: Literal["notice"] = "notice"
    job: Job
    text: str = Field(max_length=4096)


class Encoded(Message):
    """End of `EncodeText`."""

    kind: Literal["encoded"] = "encoded"
    job: Job
    conditioning: Conditioning
    seconds: float


class Sampled(Message):
    """End of `Sample`: the latent in the shape and space of the one sent. `seconds` is the sampling alone."""

    kind: Literal["sampled"] = "sampled"
    job: Job
    latent: Tensor
    seconds: float


class Decoded(Message):
    """End of `Decode`: `images` is `(B * F, H, W, 3)` float32 in 0..1, ComfyUI's IMAGE."""

    kind: Literal["decoded"] = "decoded"
    job: Job
    images: Tensor
    seconds: float


class Finished(Message):
    """A rank other than the first has ended its part of a job; the server keeps it to itself."""

    kind: Literal["finished"] = "finished"
    job: Job


class Stopped(Message):
    """The job was cancelled; weights stay loaded."""

    kind: Literal["stopped"] = "stopped"
    job: Job


class Failed(Message):
    """The job failed. `user_error` marks what the user can put right; its `message` says how."""

    kind: Literal["failed"] = "failed"
    job: Job
    message: str = Field(max_length=1 << 14)
    user_error: bool = False
    out_of_memory: bool = False
    rank: int | None = None
    stage: str = ""
    step: int | None = None
    traceback: str = Field(default="", max_length=1 << 16)


class RankReport(Message):
    """One rank as the server sees it."""

    rank: int
    pid: int
    device: str


class Report(Message):
    """Answer to `Status`."""

    kind: Literal["report"] = "report"
    pid: int
    ranks: tuple[RankReport, ...] = ()
    model: str = ""
    busy: str = ""


Event = Union[Welcome, Ready, Progress, Notice, Encoded, Sampled, Decoded, Finished, Stopped, Failed, Report]

_REQUEST = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_EVENT = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def request_from(header: dict[str, Any]) -> Request:
    """The request that a decoded header (lists as tuples) describes. Raises pydantic's `ValidationError`."""
    return _REQUEST.validate_python(header)


def event_from(header: dict[str, Any]) -> Event:
    """The event that a decoded header (lists as tuples) describes. Raises pydantic's `ValidationError`."""
    return _EVENT.validate_python(header)
