"""The messages on the wire: requests one way, events the other. Pure data; `channel` moves it.

Tensors stand in the messages as they are. On the wire a `TensorRef` takes a tensor's place in the header, and its bytes
travel beside the header: in a frame, or in a slot of shared memory. A process that only passes messages on (the server)
keeps the references and never makes tensors of them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, TypeAdapter, model_validator

from .chosen_part import TEXT_ENCODER, VAE, PartKind
from .controls import Cancel, Free, Job, Keep, Shutdown, Spread, Status
from .message import ITEM_BYTES as ITEM_BYTES  # for the nodes, which import from here alone
from .message import Conditioning, Message, Tensor
from .reports import HeldModel as HeldModel
from .reports import Memory, Report
from .reports import RankReport as RankReport
from .settings import ModelSettings, SampleSettings

PROTOCOL_VERSION = 1
MAX_ENTRIES = 32
MAX_NOTICE, MAX_MESSAGE = 4096, 1 << 14
LOADING = "loading"
"""The stage of which the steps are bytes."""


class Address(Message):
    """Where a server listens, as it says on its standard output; `token` goes into the client's `Hello`."""

    endpoint: str
    token: str
    pid: int


PreviewKind = Literal["none", "latent2rgb", "taesd"]
Scale = Annotated[int, Field(ge=1, le=256)] | None


# Requests: node -> server -> every rank ----------------------------------------------------------------------------


class Hello(Message):
    """First message of a connection; the answer is `Welcome`, or `Failed` when version or token differ."""

    kind: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    token: str = Field(default="", max_length=128)


class Work(Message):
    """Base of what the ranks do, with the model that they do it with, and the part beside its transformer that it takes."""

    part: ClassVar[PartKind | None] = None
    job: Job
    model: ModelSettings


class EncodeText(Work):
    """Encode a prompt with the model's own text encoder. Answered by `Encoded`."""

    part: ClassVar[PartKind | None] = TEXT_ENCODER
    kind: Literal["encode_text"] = "encode_text"
    text: str = Field(max_length=1 << 16)

    def __repr__(self) -> str:
        return f"<EncodeText {self.job}>"  # never the prompt: this text may reach a log

    __str__ = __repr__


class Sample(Work):
    """Denoise a latent. Answered by `Sampled`.

    `latent` is ComfyUI's, `(B, C, H, W)` or `(B, C, F, H, W)`, in the VAE's own space. `batch_index` picks whose noise
    of the batch each item gets. An empty `negative` means that there is none; `middle` stands between positive and
    negative, and goes with `cfg_middle` or `neg_scale`. `preview` asks for a picture each step,
    "taesd" for one by a small decoder, which is looked for among the files `preview_decoders`.
    `cpu_noise_offset` is what the node's ComfyUI adds to the seed of the noise between steps on a CPU (0 before 0.7),
    `downscale` the (spatial, temporal) of the VAE that an empty latent was made for, where that is known.
    `noise_mask` is 1 where the latent is painted anew, of any resolution: `(B, 1, H, W)` or `(B, C, F, H, W)`. `noise`
    stands in the place of the noise that the seed gives, and `sigmas`, `(steps + 1,)`, of the schedule.
    """

    kind: Literal["sample"] = "sample"
    settings: SampleSettings
    positive: tuple[Conditioning, ...] = Field(min_length=1, max_length=MAX_ENTRIES)
    middle: tuple[Conditioning, ...] = Field(default=(), max_length=MAX_ENTRIES)
    negative: tuple[Conditioning, ...] = Field(default=(), max_length=MAX_ENTRIES)
    latent: Tensor
    noise_mask: Tensor | None = None
    noise: Tensor | None = None
    sigmas: Tensor | None = None
    batch_index: tuple[Annotated[int, Field(ge=0, le=65535)], ...] | None = None
    preview: PreviewKind = "none"
    preview_decoders: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(default=(), max_length=4096)
    cpu_noise_offset: int = Field(default=1, ge=0, le=1)
    downscale: tuple[Scale, Scale] = (None, None)

    @property
    def branches(self) -> tuple[tuple[Conditioning, ...], ...]:
        """What guidance evaluates: from the prompt that is wanted to the one that is not."""
        middle = (self.middle,) if self.middle else ()
        return (self.positive, *middle, self.negative)

    @model_validator(mode="after")
    def _scale_for_each_branch(self) -> Sample:
        if len(self.settings.scales) != len(self.branches) - 1:
            raise ValueError("a middle prompt and cfg_middle or neg_scale go together: give both or neither")
        return self


class Check(Sample):
    """Ask for the plan of a sampling, which is not run. Answered by `Planned`, or by `Failed` where it would be refused."""

    kind: Literal["check"] = "check"


class Decode(Work):
    """Latent to pictures with the model's own VAE. Answered by `Decoded`."""

    part: ClassVar[PartKind | None] = VAE
    kind: Literal["decode"] = "decode"
    latent: Tensor


class EncodePixels(Work):
    """Pictures to a latent with the model's own VAE. Answered by `EncodedPixels`.

    `pixels` is ComfyUI's IMAGE, `(N, H, W, 3)` in 0..1; for a VAE of videos they are the frames of one.
    """

    part: ClassVar[PartKind | None] = VAE
    kind: Literal["encode_pixels"] = "encode_pixels"
    pixels: Tensor


Request = Union[Hello, EncodeText, Sample, Check, Decode, EncodePixels, Cancel, Status, Free, Spread, Keep, Shutdown]


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


def how_far(stage: str, step: int, total: int) -> str:
    """How far a stage is, in words: loading is told in bytes. Empty for a stage of one step."""
    if total <= 1:
        return ""
    return f"{step / 1e9:.2f} of {total / 1e9:.2f} GB" if stage == LOADING else f"{step}/{total}"


class Progress(Message):
    """How far a job is. `preview` is `(H, W, 3)` uint8, present only when it was asked for."""

    kind: Literal["progress"] = "progress"
    job: Job
    stage: str = Field(max_length=64)
    step: int = Field(ge=0)
    total: int = Field(ge=0)
    preview: Tensor | None = None

    @property
    def line(self) -> str:
        """The same in words."""
        return f"{self.stage} {how_far(self.stage, self.step, self.total)}".rstrip()


class Notice(Message):
    """Something the user should know: what was chosen and why, or what is slower than it could be."""

    kind: Literal["notice"] = "notice"
    job: Job
    text: str = Field(max_length=MAX_NOTICE)


class Result(Message):
    """Base of what ends a job that went well."""

    job: Job
    seconds: float


class Encoded(Result):
    """End of `EncodeText`."""

    kind: Literal["encoded"] = "encoded"
    conditioning: Conditioning


class Sampled(Result):
    """End of `Sample`: the latent in the shape and space of the one sent. `seconds` is the sampling alone."""

    kind: Literal["sampled"] = "sampled"
    latent: Tensor


class Planned(Result):
    """End of `Check`: `plan` says what was chosen, and why; `tolerance` is how large a relative error is rounding."""

    kind: Literal["planned"] = "planned"
    plan: str
    tolerance: float


class Decoded(Result):
    """End of `Decode`: `images` is `(B * F, H, W, 3)` float32 in 0..1, ComfyUI's IMAGE."""

    kind: Literal["decoded"] = "decoded"
    images: Tensor


class EncodedPixels(Result):
    """End of `EncodePixels`: the latent, `(B, C, H, W)` or `(1, C, F, H, W)`, in the VAE's own space."""

    kind: Literal["encoded_pixels"] = "encoded_pixels"
    latent: Tensor


class Finished(Message):
    """A rank other than the first has ended its part of a job; the server keeps it to itself."""

    kind: Literal["finished"] = "finished"
    job: Job


class Stopped(Message):
    """The job was cancelled; weights stay loaded."""

    kind: Literal["stopped"] = "stopped"
    job: Job


class Failed(Message):
    """The job failed. `user_error` marks what the user can put right; its `message` says how. `loaded`: the rank has the
    model all the same.
    """

    kind: Literal["failed"] = "failed"
    job: Job
    message: str = Field(max_length=MAX_MESSAGE)
    user_error: bool = False
    out_of_memory: bool = False
    loaded: bool = False
    rank: int | None = None
    stage: str = ""
    step: int | None = None
    traceback: str = Field(default="", max_length=1 << 16)


Event = Union[
    Welcome,
    Ready,
    Memory,
    Progress,
    Notice,
    Encoded,
    Sampled,
    Planned,
    Decoded,
    EncodedPixels,
    Finished,
    Stopped,
    Failed,
    Report,
]

_REQUEST = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_EVENT = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def request_from(header: dict[str, Any]) -> Request:
    """The request that a decoded header (lists as tuples) describes. Raises pydantic's `ValidationError`."""
    return _REQUEST.validate_python(header)


def event_from(header: dict[str, Any]) -> Event:
    """The event that a decoded header (lists as tuples) describes. Raises pydantic's `ValidationError`."""
    return _EVENT.validate_python(header)
