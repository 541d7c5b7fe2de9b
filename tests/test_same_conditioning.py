"""Every kind of conditioning and latent, and the steps of KSamplerAdvanced: our engine's latent is stock ComfyUI's."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.sampling import draw_noise
from runtime.settings import SampleSettings
from tests.stock import ask_comfyui, relative_error
from tests.test_same_picture import Model, draw, random_model

pytestmark = pytest.mark.comfy

LIMIT = 1e-5
SAMPLERS = ("euler", "dpmpp_2m")
STEPS = 6
BASE = {
    "latent": "video", "sampler_name": "euler", "scheduler": "simple", "cfg": 3.0, "denoise": 1.0, "seed": 5, "steps": STEPS,
    "positive": [["a", {}]], "negative": [["n", {}]],
}  # fmt: skip


def smooth(*shape: int) -> torch.Tensor:
    """A mask with every value from 0 to 1."""
    return draw(*shape, seed=11).sigmoid()


def half(*shape: int) -> torch.Tensor:
    """A mask of the left half."""
    mask = torch.zeros(shape)
    mask[..., : shape[-1] // 2] = 1
    return mask


INPUTS = {
    "a": draw(1, 7, 4096, seed=1),
    "b": draw(1, 4, 4096, seed=2),
    "c": draw(1, 7, 4096, seed=3),
    "n": draw(1, 5, 4096, seed=4),
    "zeros": torch.zeros(1, 7, 4096),
    "pair": draw(2, 7, 4096, seed=6),
    "still": torch.zeros(1, 16, 1, 10, 12),
    "odd": torch.zeros(1, 16, 1, 9, 11),
    "video": torch.zeros(1, 16, 3, 10, 12),
    "batch": torch.zeros(3, 16, 1, 10, 12),
    "picture": draw(1, 16, 1, 10, 12, seed=7),
    "pictures": draw(3, 16, 1, 10, 12, seed=8),
    "clip": draw(1, 16, 3, 10, 12, seed=9),
    "four-dims": draw(1, 16, 10, 12, seed=10),
    "four-channels": torch.zeros(2, 4, 10, 12),
    "mask": smooth(1, 10, 12),
    "mask-pixels": smooth(1, 80, 96),
    "mask-frames": smooth(3, 20, 24),
    "mask-half": half(1, 40, 48),
    "mask-zeros": torch.zeros(1, 10, 12),
    "mask-right": 1 - half(1, 10, 12),
    "noise-mask": half(1, 1, 80, 96),
    "noise-mask-smooth": smooth(1, 1, 10, 12),
    "noise-mask-frames": smooth(3, 1, 40, 48),
    "noise-mask-5d": smooth(2, 1, 3, 5, 6),
    "noise-mask-channels": smooth(1, 4, 1, 10, 12),
}
AREA, FEATHERED, PERCENT = (6, 8, 0, 0), (7, 8, 2, 3), ("percentage", 0.7, 0.5, 0.6, 0.34, 0.2, 0.4)
ENTRIES = {
    "strength": {"strength": 0.4},
    "strength-zero": {"strength": 0.0},
    "area": {"area": AREA},
    "area-feathered": {"area": FEATHERED, "strength": 0.7},
    "area-cut": {"area": (40, 40, 4, 6), "strength": 1.5},
    "area-frames": {"area": (2, 8, 8, 1, 0, 4)},
    "area-percent": {"area": PERCENT},
    "mask": {"mask": "mask"},
    "mask-pixels": {"mask": "mask-pixels", "mask_strength": 0.8, "strength": 0.9},
    "mask-frames": {"mask": "mask-frames"},
    "mask-zeros": {"mask": "mask-zeros", "set_area_to_bounds": False},
    "range-start": {"start_percent": 0.2, "end_percent": 1.0},
    "range": {"start_percent": 0.1, "end_percent": 0.5},
    "range-never": {"start_percent": 0.9, "end_percent": 0.1},
}
"""Options of one entry."""
KINDS = {
    f"{name}: {form}": {"positive": positive, "negative": negative}
    for name, options in ENTRIES.items()
    for form, positive, negative in (
        ("alone", [["a", options]], [["n", {}]]),
        ("with another", [["a", {}], ["b", options]], [["n", {}]]),
        ("on both sides", [["a", {}], ["c", options]], [["n", options], ["n", {}]]),
        ("negative", [["a", {}]], [["n", options]]),
    )
} | {
    "combined": {"positive": [["a", {}], ["b", {}], ["c", {}]]},
    "combined of one length": {"positive": [["a", {}], ["c", {}]], "negative": [["zeros", {}]]},
    "more than go together": {"positive": [["a", {"strength": share}] for share in (0.1, 0.5, 1.0, 1.5, 2.0, 0.3)]},
    "zeroed out": {"positive": [["zeros", {}]]},
    "two prompts in turn": {"positive": [["a", {"end_percent": 0.3}], ["b", {"start_percent": 0.3}]]},
    "prompts of a clip schedule": {
        "positive": [["a", {"clip_start_percent": 0.0, "clip_end_percent": 0.4}],
                     ["c", {"clip_start_percent": 0.4, "clip_end_percent": 1.0, "start_percent": 0.5, "end_percent": 0.9}]],
    },
    "halves by mask": {"positive": [["a", {"mask": "mask-half"}], ["b", {"mask": "mask-right"}]]},
    "default beside a mask": {"positive": [["a", {"mask": "mask-half", "mask_strength": 0.6}], ["b", {"default": True}]]},
    "default beside an area": {"positive": [["a", {"area": AREA}], ["b", {"default": True}]], "negative": [["n", {"default": True}]]},
    "default with nothing left": {"positive": [["a", {}], ["b", {"default": True}]]},
    "areas inside areas": {
        "positive": [["a", {"area": (8, 10, 0, 0)}], ["b", {"area": (6, 6, 1, 1)}], ["c", {}]],
        "negative": [["n", {"area": (9, 11, 0, 0)}], ["zeros", {"area": (10, 12, 0, 0)}]],
    },
    "area of the negative at cfg 1": {"negative": [["n", {"area": AREA}]], "cfg": 1.0},
    "area of the positive at cfg 1": {"positive": [["a", {"area": AREA}], ["b", {}]], "cfg": 1.0},
    "area in an odd latent": {"latent": "odd", "positive": [["a", {}], ["b", {"area": (5, 5, 2, 3)}]]},
    "area and mask of a still": {"latent": "still", "positive": [["a", {"area": AREA, "mask": "mask"}], ["b", {}]]},
    "mask in a batch": {"latent": "batch", "positive": [["a", {"mask": "mask"}], ["b", {}]]},
    "pair of prompts in a batch": {"latent": "batch", "positive": [["pair", {"strength": 0.5}], ["b", {"area": AREA}]]},
    "kept keys without effect": {"positive": [["a", {"guidance": 2.0, "width": 64, "pooled_output": None}]]},
}  # fmt: skip
LATENTS = {
    f"noise mask: {mask} of {latent}": {"latent": latent, "noise_mask": mask}
    for latent, mask in product(("picture", "pictures", "clip", "four-dims"), ("noise-mask", "noise-mask-smooth"))
} | {
    "noise mask of frames": {"latent": "clip", "noise_mask": "noise-mask-frames"},
    "noise mask in 5 dims": {"latent": "pictures", "noise_mask": "noise-mask-5d"},
    "noise mask of channels": {"latent": "picture", "noise_mask": "noise-mask-channels"},
    "noise mask of an empty latent": {"latent": "four-channels", "noise_mask": "noise-mask-smooth"},
    "noise mask, half denoised": {"latent": "picture", "noise_mask": "noise-mask-smooth", "denoise": 0.5},
    "noise mask and batch index": {"latent": "pictures", "noise_mask": "noise-mask", "batch_index": [2, 0, 2]},
    "noise mask and area": {
        "latent": "clip",
        "noise_mask": "noise-mask-smooth",
        "positive": [["a", {}], ["b", {"area": AREA}]],
    },
    "noise mask at cfg 1": {"latent": "picture", "noise_mask": "noise-mask", "cfg": 1.0},
    "batch index": {"latent": "pictures", "batch_index": [1, 1, 0], "denoise": 0.7},
    "little denoised": {"latent": "picture", "denoise": 0.3},
}
ADVANCED = {
    f"steps {start} to {end}, {noise} noise, {leftover} leftover": {
        "latent": latent, "advanced": [noise, start, end, leftover]
    }
    for (start, end), noise, leftover, latent in (
        ((0, 10000), "enable", "disable", "still"),
        ((2, 10000), "enable", "disable", "picture"),
        ((2, 10000), "disable", "enable", "picture"),
        ((0, 3), "enable", "disable", "still"),
        ((0, 3), "enable", "enable", "still"),
        ((2, 4), "enable", "enable", "picture"),
        ((2, 4), "disable", "disable", "picture"),
        ((4, 4), "enable", "enable", "picture"),
        ((5, 3), "enable", "enable", "picture"),
        ((0, 0), "enable", "disable", "picture"),
        ((6, 6), "enable", "disable", "picture"),
        ((5, 6), "enable", "disable", "picture"),
    )
} | {
    "steps and a noise mask": {
        "latent": "picture", "noise_mask": "noise-mask-smooth", "advanced": ["enable", 1, 4, "enable"]
    },
    "steps and a range": {
        "latent": "still", "positive": [["a", {"end_percent": 0.3}], ["b", {}]], "advanced": ["enable", 1, 4, "disable"]
    },
    "shift": {"shift": 3.0},
    "shift 1": {"shift": 1.0, "scheduler": "beta"},
    "shift and a range": {"shift": 2.5, "positive": [["a", {"end_percent": 0.4}], ["b", {"start_percent": 0.4}]]},
    "sigmas and noise": {"latent": "picture", "sigmas": [0.8, 0.7, 0.35, 0.0]},
    "sigmas that end before 0": {"latent": "batch", "sigmas": [1.0, 0.85, 0.6, 0.2]},
    "sigmas and a mask": {"latent": "clip", "noise_mask": "noise-mask-frames", "sigmas": [0.9, 0.5, 0.1, 0.0]},
    "noise handed over, first": {"latent": "still", "advanced": ["enable", 0, 3, "enable"], "steps": 8},
    "noise handed over, second": {"latent": "before", "advanced": ["disable", 3, 10000, "disable"], "steps": 8, "seed": 77},
}  # fmt: skip
OTHERS = {
    f"{what} with {name}": BASE | case | {"sampler_name": name}
    for name in ("ddim", "uni_pc", "euler_ancestral", "euler_cfg_pp", "dpmpp_sde", "res_multistep_cfg_pp", "er_sde")
    for what, case in {
        "noise mask": {"latent": "pictures", "noise_mask": "noise-mask-smooth"},
        "noise mask and area at cfg 1": {
            "latent": "picture", "noise_mask": "noise-mask", "cfg": 1.0, "positive": [["a", {}], ["b", {"area": AREA}]],
        },
        "steps and shift": {"shift": 3.0, "latent": "picture", "advanced": ["enable", 1, 4, "enable"]},
    }.items()
}  # fmt: skip
"""Samplers that treat masks, the negative prompt or the ends of the schedule in their own way."""

NAMED = KINDS | LATENTS | ADVANCED
CASES = {
    f"{name}, {sampler}": BASE | case | {"sampler_name": sampler}
    for sampler in SAMPLERS
    for name, case in NAMED.items()
}
FEW = (
    {name: case for place, (name, case) in enumerate(CASES.items()) if place % 6 == 0 or "handed over" in name}
    | OTHERS
    | {"a single sigma": BASE | {"latent": "picture", "sigmas": [0.6], "sampler_name": "uni_pc"}}
)
PAIRS = {
    f"{first} and {second}, {sampler}": BASE
    | {
        "latent": "still", "sampler_name": sampler,
        "positive": [["a", {**ENTRIES[second], **ENTRIES[first]}], ["b", ENTRIES[second]], ["c", ENTRIES[first]]],
    }
    for (first, second), sampler in product(combinations(
        [name for name in ENTRIES if "frames" not in name and name != "area-percent"], 2), SAMPLERS)
}  # fmt: skip


def entry(name: str, options: dict) -> Conditioning:
    """What the nodes make of an entry of CONDITIONING."""
    options, kept = dict(options), {}
    area = options.pop("area", None)
    if area is not None:
        kept = {"area_percent": tuple(area[1:])} if area[0] == "percentage" else {"area": tuple(area)}
    if "clip_start_percent" in options:
        options["start_percent"] = max(options.pop("clip_start_percent"), options.get("start_percent", 0.0))
        options["end_percent"] = min(options.pop("clip_end_percent"), options.get("end_percent", 1.0))
    if "mask" in options:
        kept["mask"] = INPUTS[options.pop("mask")]
    read = {key: value for key, value in options.items() if key in Conditioning.model_fields}
    return Conditioning(embedding=INPUTS[name], **read, **kept)


def sample(model: Model, case: dict, latent: torch.Tensor) -> torch.Tensor:
    widgets = {name: case[name] for name in SampleSettings.model_fields if name in case}
    if "advanced" in case:
        add, start, end, leftover = case["advanced"]
        widgets |= {"add_noise": add == "enable", "start_at_step": start, "end_at_step": end}
        widgets["leftover_noise"] = leftover == "enable"
    request = Sample(
        job="same-conditioning",
        model=model.settings,
        settings=SampleSettings(**widgets),
        positive=tuple(entry(*each) for each in case["positive"]),
        negative=tuple(entry(*each) for each in case["negative"]),
        latent=latent,
        noise_mask=INPUTS[case["noise_mask"]] if "noise_mask" in case else None,
        sigmas=torch.tensor(case["sigmas"]) if "sigmas" in case else None,
        noise=draw_noise(latent.shape, seed=case["seed"]) if "sigmas" in case else None,
        batch_index=tuple(case["batch_index"]) if "batch_index" in case else None,
        cpu_noise_offset=0,
    )
    return model.pipeline.sample(request, progress=ignore_progress)


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """Runs cases on both sides and gives the relative error of each."""
    model = random_model(tmp_path_factory.mktemp("models"))

    def run(cases: dict[str, dict]) -> dict[str, float]:
        samples = [case | {"model": str(model.checkpoint)} for case in cases.values()]
        for number, case in enumerate(samples):
            if case["latent"] == "before":
                case["latent"] = f"samples.{number - 1}"
        stock = ask_comfyui(tmp_path_factory.mktemp("stock"), inputs=INPUTS, samples=samples)
        errors, before = {}, None
        for number, (name, case) in enumerate(cases.items()):
            before = sample(model, case, before if case["latent"] == "before" else INPUTS[case["latent"]].clone())
            errors[name] = relative_error(before, stock[f"samples.{number}"])
        return errors

    return run


def check(errors: dict[str, float], capsys) -> None:
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else 9.0)
    with capsys.disabled():
        print(f"\n  {len(errors)} latents, worst relative error {errors[worst]:.1e} ({worst})", end="")
    assert not {name: error for name, error in errors.items() if not error <= LIMIT}


def test_latent_is_stocks_for_every_kind_of_conditioning_and_latent(compare, capsys):
    check(compare(FEW), capsys)


@pytest.mark.full
def test_latent_is_stocks_for_every_kind_with_each_sampler(compare, capsys):
    check(compare(CASES | OTHERS), capsys)


@pytest.mark.full
def test_latent_is_stocks_for_pairs_of_kinds(compare, capsys):
    check(compare(PAIRS), capsys)
