"""Frozen settings and their checks: one definition for node, wire, command line and worker."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

AXES = ("data", "cfg", "ring", "ulysses", "tensor")
"""The mesh axes, outermost first."""

MAX_DEGREE, MAX_STRENGTH, MAX_LORAS = 64, 100.0, 64
TINY_SHAPES, FROM_MODEL = "tiny-shapes", "from model"
"""The built-in model, and the choice of a component that comes with the model itself."""

SAMPLER_NAMES = (
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0",
    "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms", "dpm_fast", "dpm_adaptive", "dpmpp_2s_ancestral",
    "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde",
    "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm",
    "lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp", "er_sde", "seeds_2",
    "seeds_3", "sa_solver", "sa_solver_pece", "ddim", "uni_pc", "uni_pc_bh2",
)  # fmt: skip
SCHEDULER_NAMES = (
    "simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal", "linear_quadratic", "kl_optimal",
)  # fmt: skip
"""Both in ComfyUI's order."""
DTYPES = ("auto", "bf16", "fp16", "fp32")
QUANT_KINDS = ("none", "fp8", "svdquant-int4", "svdquant-nvfp4")
EXPERTS = ("high noise", "low noise")
"""Of a pair that takes turns, in the order in which they run."""
BOTH_EXPERTS = "both"
OFFLOAD_KINDS = ("none", "layerwise", "disk")
FETCH_KINDS = ("auto", "own", "gather")
COMPONENT_PLACES = ("auto", "device", "cpu", "on-demand")
AUTO = "auto"

_DEVICES = re.compile(r"auto|cpu:[1-9][0-9]?|cuda:[0-9]{1,2}(,[0-9]{1,2})*")
_AMOUNT = re.compile(r"[0-9]{1,4}|0?\.[0-9]{1,6}|1\.0*")


class Settings(BaseModel):
    """Base of every setting: immutable, strict about types, an unknown field is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def formula(degrees: Mapping[str, int]) -> str:
    """Degrees as one multiplies them, such as "cfg 2 x ulysses 4"."""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


class ParallelSettings(Settings):
    """Devices and the degree of each mesh axis; 0 leaves a degree to the planner.

    `devices` is "auto", "cpu:N" (N ranks on the processor) or "cuda:0,1" (one rank on each device listed).
    """

    devices: str = "auto"
    ulysses: int = Field(default=0, ge=0, le=MAX_DEGREE)
    ring: int = Field(default=0, ge=0, le=MAX_DEGREE)
    tensor: int = Field(default=0, ge=0, le=MAX_DEGREE)
    cfg: int = Field(default=0, ge=0, le=MAX_DEGREE)
    data: int = Field(default=0, ge=0, le=MAX_DEGREE)

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, devices: str) -> str:
        if not _DEVICES.fullmatch(devices := devices.replace(" ", "")):
            raise ValueError(f"devices {devices!r} is not one of: auto, cpu:N (such as cpu:2), cuda:0,1")
        numbers = [int(number) for number in re.findall("[0-9]+", devices)]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"devices {devices!r} names a device twice: give each rank its own")
        return devices

    @model_validator(mode="after")
    def _degrees_fit_devices(self) -> ParallelSettings:
        count, product = self.device_count, self.product
        if count is None or (count % product == 0 if self.open_axes else count == product):
            return self
        if count > MAX_DEGREE:
            raise ValueError(f"{self.devices} is more than {MAX_DEGREE} ranks: name {MAX_DEGREE} devices at most")
        raise ValueError(
            f"{self.devices} is {count} device{'s'[: count > 1]}, but {formula(self.set_degrees)} = {product}: "
            f"choose degrees whose product is {count}, such as ring {count} alone, or set a degree to 0 to have it chosen"
        )

    @property
    def device_count(self) -> int | None:
        """How many devices are named; None for auto."""
        if self.devices == "auto":
            return None
        kind, _, listed = self.devices.partition(":")
        return int(listed) if kind == "cpu" else listed.count(",") + 1

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, outermost first; 0 is one that is left to the planner."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def set_degrees(self) -> dict[str, int]:
        """The degrees that are not left to the planner, by axis."""
        return {axis: degree for axis, degree in self.degrees.items() if degree}

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The axes that are left to the planner."""
        return tuple(axis for axis, degree in self.degrees.items() if not degree)

    @property
    def one_rank(self) -> ParallelSettings:
        """The first of these devices alone."""
        kind, _, listed = self.devices.partition(":")
        first = {"auto": "auto", "cpu": "cpu:1"}.get(kind, f"cuda:{listed.partition(',')[0]}")
        return ParallelSettings(devices=first, **dict.fromkeys(AXES, 1))

    @property
    def product(self) -> int:
        """Product of the degrees that are set."""
        return math.prod(self.set_degrees.values())


class LoraSettings(Settings):
    """A LoRA file by absolute path, and how strongly it counts; negative takes away, 0 is off.

    `strength_clip` is that of its part for the text encoder, where the model's own encodes the prompt; None for the same.
    `expert` is the one of a pair that it is for. `fuse` folds it into plain weights that stay on the device: faster steps, slower
    changes. `stamp` as for a model.
    """

    path: str = Field(min_length=1)
    strength: float = Field(default=1.0, ge=-MAX_STRENGTH, le=MAX_STRENGTH, allow_inf_nan=False)
    strength_clip: float | None = Field(default=None, ge=-MAX_STRENGTH, le=MAX_STRENGTH, allow_inf_nan=False)
    expert: Literal["both", "high noise", "low noise"] = "both"
    fuse: bool = False
    stamp: str = Field(default="", max_length=256)


class MemorySettings(Settings):
    """Where the weights of the transformer's blocks are while they do not run.

    `offload` "none": on the device. "layerwise": in host memory. "disk": in their file, which is read anew in each step.
    `resident_blocks` stay on the device all the same, and `prefetch` of the others are on their way while one runs: a count
    such as "2" or a part such as "0.25"; resident blocks "auto" are as many as the free memory holds. `fetch` is for ranks
    that share a picture's tokens: each copies its "own" blocks, or a part of each that they "gather"; "auto" measures once.
    `text_encoder_device` and `vae_device` "device": there all the time; "cpu": they run on the processor; "on-demand": read
    for each use, and let go of after it. "auto": the text encoder waits in host memory, the VAE on the device.
    """

    offload: Literal["none", "layerwise", "disk"] = "none"
    resident_blocks: str = AUTO
    prefetch: str = "1"
    text_encoder_device: Literal["auto", "device", "cpu", "on-demand"] = "auto"
    vae_device: Literal["auto", "device", "cpu", "on-demand"] = "auto"
    fetch: Literal["auto", "own", "gather"] = "auto"

    @field_validator("resident_blocks", "prefetch")
    @classmethod
    def _known_amount(cls, text: str, info: ValidationInfo) -> str:
        text = text.strip()
        if not (_AMOUNT.fullmatch(text) or (text == AUTO and info.field_name == "resident_blocks")):
            auto = "auto, " if info.field_name == "resident_blocks" else ""
            raise ValueError(f"{info.field_name} {text!r} is not one of: {auto}a count to 9999, a part such as 0.25")
        return text

    @model_validator(mode="after")
    def _amounts_are_used(self) -> MemorySettings:
        if self.offload == "none" and (self.resident_blocks, self.prefetch, self.fetch) != (AUTO, "1", AUTO):
            raise ValueError(
                f"resident_blocks {self.resident_blocks}, prefetch {self.prefetch} and fetch {self.fetch} are for offload "
                f"layerwise or disk, but offload is none: choose one of those, or leave them at auto, 1 and auto"
            )
        return self


def amount_of(text: str, total: int) -> int:
    """How many of `total` a count ("2") or a part ("0.25") is."""
    return min(int(text), total) if text.isdigit() else math.ceil(Fraction(text) * total)


class ModelSettings(Settings):
    """What Load Model describes: files by absolute path (or `tiny-shapes`), number format, plan.

    `text_encoder`, `text_encoder_2`, `text_encoder_3` and `vae` are "from model" or the absolute path of a file or folder.
    `tokenizers` is ComfyUI's package `comfy`, which has those of the text encoders; empty where it is not known. `stamp`
    changes when one of the model's files changes, so that a file replaced in place is another model. `loras` are put on in
    their order. They, text encoders and VAE are changed without loading the model again.

    `model_low_noise` is a second expert, which runs below the sigma `boundary`: empty for none, or for the one in the
    model's own folder; 0 for the boundary that the family or the folder has.
    """

    model: str = Field(min_length=1)
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    quant: Literal["none", "fp8", "svdquant-int4", "svdquant-nvfp4"] = "none"
    text_encoder: str = FROM_MODEL
    text_encoder_2: str = FROM_MODEL
    vae: str = FROM_MODEL
    parallel: ParallelSettings = ParallelSettings()
    loras: tuple[LoraSettings, ...] = Field(default=(), max_length=MAX_LORAS)
    memory: MemorySettings = MemorySettings()
    stamp: str = Field(default="", max_length=256)
    model_low_noise: str = ""
    boundary: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    tokenizers: str = ""
    text_encoder_3: str = FROM_MODEL

    @property
    def weights(self) -> ModelSettings:
        """What is loaded for these settings: how it is spread is the plan's, and LoRAs, text encoder and VAE come later."""
        memory = self.memory.model_copy(update={"text_encoder_device": AUTO, "vae_device": AUTO})
        later = {"memory": memory, "parallel": ParallelSettings(), "loras": (), "vae": FROM_MODEL, "tokenizers": ""}
        encoders = dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), FROM_MODEL)
        return self.model_copy(update=later | encoders)

    def __repr__(self) -> str:
        return f"<Outrigger model {self.model.rsplit('/', 1)[-1]} {self.dtype} on {self.parallel.devices}>"

    __str__ = __repr__


class SampleSettings(Settings):
    """The widgets of the Samplers, with the bounds of ComfyUI's KSampler and KSamplerAdvanced.

    `add_noise` False starts from the latent as it is. The steps run are those from `start_at_step` to `end_at_step`;
    where the end cuts the schedule short, the last one still goes to sigma 0, unless `leftover_noise` is wanted.
    `shift` is the sigma shift of flow models, 0 for the model's own. Where `max_shift` is not 0, the shift follows from the
    size of the picture instead, as ModelSamplingFlux sets it: between `base_shift` and it. With a middle prompt, `cfg` says
    how far the positive one is moved away from it, and either `cfg_middle` how far that is from the negative one, or
    `neg_scale` how far from what only the negative one has (Perp-Neg).
    """

    seed: int = Field(default=0, ge=0, le=0xFFFFFFFFFFFFFFFF)
    steps: int = Field(default=20, ge=1, le=10000)
    cfg: float = Field(default=5.0, ge=0.0, le=100.0, allow_inf_nan=False)
    sampler_name: str = "euler"
    scheduler: str = "simple"
    denoise: float = Field(default=1.0, ge=0.0, le=1.0, allow_inf_nan=False)
    add_noise: bool = True
    start_at_step: int = Field(default=0, ge=0, le=10000)
    end_at_step: int = Field(default=10000, ge=0, le=10000)
    leftover_noise: bool = False
    shift: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    max_shift: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    base_shift: float = Field(default=0.5, ge=0.0, le=100.0, allow_inf_nan=False)
    cfg_middle: float | None = Field(default=None, ge=0.0, le=100.0, allow_inf_nan=False)
    neg_scale: float | None = Field(default=None, ge=0.0, le=100.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_shift_and_guidance(self) -> SampleSettings:
        if self.shift and self.max_shift:
            raise ValueError(
                f"shift {self.shift:g} and max_shift {self.max_shift:g} are both set: set one of them to 0; max_shift is for "
                f"a shift that follows from the size of the picture"
            )
        if self.cfg_middle is not None and self.neg_scale is not None:
            raise ValueError(
                f"cfg_middle {self.cfg_middle:g} and neg_scale {self.neg_scale:g} are two kinds of guidance: disconnect either "
                f"middle or empty_conditioning"
            )
        return self

    @property
    def scales(self) -> tuple[float, ...]:
        """How far each prompt but the last is moved away from the next one."""
        return (self.cfg, *(scale for scale in (self.cfg_middle, self.neg_scale) if scale is not None))

    @property
    def is_perpendicular(self) -> bool:
        """Whether guidance is Perp-Neg."""
        return self.neg_scale is not None

    @property
    def needs_negative(self) -> bool:
        """Whether the negative prompt is evaluated: where its scale leaves it without effect only by the CFG++ samplers."""
        without_effect = 0.0 if self.is_perpendicular else 1.0
        return not math.isclose(self.scales[-1], without_effect) or self.sampler_name.endswith("_cfg_pp")

    @field_validator("sampler_name")
    @classmethod
    def _known_sampler(cls, name: str) -> str:
        return _listed("sampler", name, SAMPLER_NAMES)

    @field_validator("scheduler")
    @classmethod
    def _known_scheduler(cls, name: str) -> str:
        return _listed("scheduler", name, SCHEDULER_NAMES)


def _listed(what: str, name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        raise ValueError(f"{what} {name!r} is not available in Outrigger; choose one of: {', '.join(names)}")
    return name
