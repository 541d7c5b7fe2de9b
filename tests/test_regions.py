"""Where a conditioning counts: the weights are ComfyUI's to the last bit, and what does not fit is refused."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from runtime.areas import area_of_mask, pair_areas
from runtime.guidance import NO_WEIGHT, Denoiser, Entry
from runtime.protocol import Conditioning
from runtime.regions import box_of, resolve_region, weight_of
from runtime.sampling import FlowTable, cut_sigmas, fit_noise_mask
from tests.ranks import run_as_threads
from tests.stock import ask_comfyui
from tests.test_same_conditioning import FEATHERED, PERCENT, draw, half, smooth

LATENTS = {"pictures": draw(3, 4, 12, 30, seed=1), "video": draw(2, 4, 5, 12, 30, seed=2)}
spot, frames = torch.zeros(1, 24, 60), torch.zeros(5, 12, 30)
spot[0, 9:14, 20:55] = 0.5
frames[2, 3:5, 28:] = 1
INPUTS = LATENTS | {
    "smooth": smooth(1, 12, 30),
    "each": smooth(3, 96, 240),
    "half": half(1, 24, 60),
    "spot": spot,
    "nothing": torch.zeros(1, 7, 7),
    "frames": frames,
    "e": torch.zeros(1, 1, 4),
}
EVERYWHERE = {
    "plain": {},
    "strength": {"strength": 0.3},
    "corner": {"area": (5, 9, 0, 0)},
    "middle": {"area": FEATHERED, "strength": 1.7},
    "wide": {"area": (2, 30, 4, 0)},
    "cut": {"area": (90, 90, 6, 20)},
    "small": {"area": (1, 3, 11, 27)},
    "mask": {"mask": "smooth", "strength": 0.9, "mask_strength": 0.7},
    "half": {"mask": "half"},
    "middle and mask": {"area": FEATHERED, "mask": "smooth"},
}
OPTIONS = {
    "pictures": EVERYWHERE | {
        "percent": {"area": ("percentage", 0.45, 0.7, 0.3, 0.24)},
        "each": {"mask": "each"},
        "bounds": {"mask": "spot", "set_area_to_bounds": True},
        "bounds of nothing": {"mask": "nothing", "set_area_to_bounds": True},
        "bounds of half": {"mask": "half", "set_area_to_bounds": True, "strength": 2.0},
    },
    "video": {name: options for name, options in EVERYWHERE.items() if name != "middle and mask"} | {
        "percent": {"area": PERCENT},
        "frames": {"mask": "frames"},
        "frames area": {"area": (2, 8, 8, 2, 3, 4), "mask": "frames"},
        "last frames": {"area": (9, 8, 20, 3, 0, 0)},
    },
}  # fmt: skip
CASES = [
    {"latent": latent, "positive": [["e", options[first]], ["e", options[second]]], "negative": [["e", options[third]], ["e", options[first]]]}
    for latent, options in OPTIONS.items()
    for (first, second), third in product(combinations(options, 2), list(options)[::3])
    if len({len(options[name]["area"]) // 2 for name in (first, second, third) if "area" in options[name]}) < 2
]  # fmt: skip
"""Areas of one number of dims: stock ComfyUI cannot compare one of a picture with one of a video."""


def entry(name: str, options: dict) -> Conditioning:
    fields = {name: options[name] for name in ("strength", "mask_strength") if name in options}
    area = options.get("area")
    if area is not None:
        fields |= {"area_percent": tuple(area[1:])} if area[0] == "percentage" else {"area": area}
    if "mask" in options:
        fields |= {"mask": INPUTS[options["mask"]], "area_from_mask": options.get("set_area_to_bounds", False)}
    return Conditioning(embedding=INPUTS[name], **fields)


def weights(conditioning: Conditioning, x: torch.Tensor) -> torch.Tensor:
    """The weight of an entry in its place in the latent."""
    whole, box = torch.zeros_like(x), box_of(conditioning.area, x.shape)
    (whole if box is None else whole[box]).copy_(weight_of(conditioning, box, x))
    return whole


@pytest.mark.comfy
def test_weights_and_counterparts_are_comfyuis(tmp_path):
    stock = ask_comfyui(tmp_path, inputs=INPUTS, regions=CASES)
    for number, case in enumerate(CASES):
        x = LATENTS[case["latent"]]
        sides = [
            [resolve_region(entry(*each), x.shape[2:]) for each in case[side]] for side in ("positive", "negative")
        ]
        ours = torch.stack([weights(each, x) for side in pair_areas(*sides) for each in side])
        assert torch.equal(ours, stock[f"regions.{number}"]), case


@pytest.mark.parametrize("size", [(8, 8), (61, 96), (96, 240)])
def test_the_area_that_follows_from_a_mask_is_known_without_its_numbers(size):
    """But for the last bit of a place, which can move an edge by one."""
    generator = torch.Generator().manual_seed(len(size))
    for number in range(50):
        mask = torch.zeros(1, *size)
        starts = [int(torch.randint(0, length, (), generator=generator)) for length in size]
        lengths = [int(torch.randint(1, length + 1, (), generator=generator)) for length in size]
        pairs = zip(starts, lengths, size, strict=True)
        spans = [(start, min(start + own, whole)) for start, own, whole in pairs] if number else [(0, 0)] * 2
        mask[:, slice(*spans[0]), slice(*spans[1])] = 1
        read = Conditioning(embedding=INPUTS["e"], mask=mask, area_from_mask=True)
        ours = area_of_mask(spans, size, (12, 30))
        assert max(abs(a - b) for a, b in zip(ours, resolve_region(read, (12, 30)).area, strict=True)) <= 1


# What stock ComfyUI ends on with an error in the middle of sampling


def test_an_area_in_percent_of_a_picture_is_taken_for_all_frames():
    given = entry("e", {"area": ("percentage", 0.5, 0.5, 0.0, 0.5)})
    assert resolve_region(given, (5, 12, 30)).area == (5, 6, 15, 0, 0, 15)


def test_bounds_of_a_mask_hold_for_all_frames_of_a_video():
    given = resolve_region(entry("e", {"mask": "frames", "set_area_to_bounds": True}), (5, 12, 30))
    assert given.area == (8, 8, 3, 28)
    assert box_of(given.area, (1, 4, 5, 12, 30))[2:] == (slice(0, 5), slice(3, 11), slice(28, 30))


@pytest.mark.parametrize(
    ("options", "latent", "says"),
    [
        ({"area": (4, 4, 12, 0)}, "pictures", r"begins at \(12, 0\), outside the latent of \(12, 30\): move"),
        ({"area": (0, 4, 0, 0)}, "pictures", "at least 1 latent pixel"),
        ({"area": (1, 4, 4, 0, 0, 0)}, "pictures", "one of a video"),
        ({"area": ("percentage", 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)}, "pictures", "one of a video"),
        ({"mask": "each"}, "video", "has 3 frames, but the latent has 5"),
    ],
)
def test_a_region_that_does_not_fit_is_refused(options, latent, says):
    x = LATENTS[latent]
    with pytest.raises(ValueError, match=says):
        weights(resolve_region(entry("e", options), x.shape[2:]), x)


def test_areas_of_pictures_and_of_videos_are_compared():
    part, whole = entry("e", {"area": (3, 4, 4, 0, 1, 1)}), entry("e", {"area": (5, 6, 0, 0)})
    positive, negative = pair_areas([part], [whole])
    assert [each.area for each in positive] == [part.area]
    assert [each.area for each in negative] == [whole.area, part.area]


def test_masks_of_a_batch_must_divide_it():
    given = resolve_region(Conditioning(embedding=INPUTS["e"], mask=smooth(2, 12, 30)), (12, 30))
    with pytest.raises(ValueError, match="2 pictures, which do not divide a batch of 3"):
        weight_of(given, None, LATENTS["pictures"])


# Guidance with entries


def test_a_branch_without_an_entry_in_use_predicts_nothing():
    x, sigma = torch.ones(2, 1, 3, 3), torch.tensor(0.5)
    never = Entry(Conditioning(embedding=torch.ones(1, 1, 4)), start=0.2)
    denoise = Denoiser(lambda x, sigma, read: x * 3, [[Entry(never.conditioning)], [never]], scales=[4.0], batch=2)
    assert torch.equal(denoise(x, sigma), x * 3 * 4)
    assert torch.equal(denoise(x, torch.tensor(0.2)), x * 3)


def test_entries_of_one_shape_go_through_the_model_together_and_others_alone():
    calls = []

    def predict(x, sigma, read):
        calls.append((tuple(x.shape), len(read.embedding)))
        return x

    box = (slice(None), slice(None), slice(0, 2), slice(0, 2))
    alike, longer = (Conditioning(embedding=torch.ones(1, length, 4)) for length in (2, 3))
    weight = torch.ones(1, 1, 1, 1)
    entries = [Entry(alike), Entry(longer), Entry(alike, box=box, weight=weight), Entry(alike, weight=weight)]
    denoise = Denoiser(predict, [entries, [Entry(alike)]], scales=[2.0], batch=2)
    x = draw(2, 1, 4, 4, seed=1)
    assert torch.allclose(denoise(x, torch.tensor(0.5)), x)
    assert calls == [((6, 1, 4, 4), 6), ((2, 1, 4, 4), 2), ((2, 1, 2, 2), 2)]


def test_a_place_that_no_entry_covers_is_empty():
    box = (slice(None), slice(None), slice(0, 2), slice(0, 4))
    covered = Entry(Conditioning(embedding=torch.ones(1, 1, 4)), box=box, weight=torch.ones(1, 1, 2, 4))
    denoised = Denoiser(lambda x, sigma, read: x + 5, [[covered], []], scales=[1.0], batch=1)(
        torch.ones(1, 2, 4, 4), torch.tensor(1.0)
    )
    assert torch.equal(denoised[:, :, :2], torch.full((1, 2, 2, 4), 6.0)) and not denoised[:, :, 2:].any()
    assert 1.0 + NO_WEIGHT == 1.0


def test_each_group_of_the_cfg_axis_evaluates_the_entries_of_its_branch():
    def run(mesh) -> tuple[torch.Tensor, int]:
        calls = []

        def predict(x, sigma, read):
            calls.append(len(x))
            return x * read.embedding.mean()

        ones = Conditioning(embedding=torch.ones(1, 1, 4))
        weight = torch.full((1, 1, 1, 1), 3.0)
        positive = [Entry(ones), Entry(Conditioning(embedding=torch.full((1, 2, 4), 5.0)), weight=weight)]
        denoise = Denoiser(
            predict, [positive, [Entry(ones, start=0.5)]], scales=[2.0], batch=2, group=mesh.group("cfg")
        )
        return denoise(torch.ones(2, 1, 3, 3), torch.tensor(0.9)), len(calls)

    (first, calls), (second, none) = run_as_threads({"cfg": 2}, run)
    assert torch.equal(first, second) and torch.allclose(first, torch.full((2, 1, 3, 3), 2 * (1 + 3 * 5) / 4))
    assert (calls, none) == (2, 0)


# Masks of latents, and parts of a schedule


@pytest.mark.parametrize(
    ("mask", "shape", "says"),
    [
        (torch.ones(3), (1, 4, 8, 8), "height and width"),
        (torch.ones(1, 5, 1, 8, 8), (1, 4, 1, 8, 8), "has 5 channels, but the latent has 4"),
    ],
)
def test_a_noise_mask_that_does_not_fit_is_refused(mask, shape, says):
    with pytest.raises(ValueError, match=says):
        fit_noise_mask(mask, shape)


def test_a_schedule_is_cut_as_the_steps_say():
    sigmas = FlowTable(shift=3.0).sigmas[[999, 600, 300, 100]]
    sigmas = torch.cat([sigmas, torch.zeros(1)])
    kept = sigmas.clone()
    assert torch.equal(cut_sigmas(sigmas, start=0, end=10000, leftover_noise=False), kept)
    assert torch.equal(cut_sigmas(sigmas, start=1, end=3, leftover_noise=True), kept[1:4])
    assert cut_sigmas(sigmas, start=1, end=3, leftover_noise=False)[-1] == 0 and torch.equal(sigmas, kept)
    assert not len(cut_sigmas(sigmas, start=3, end=3, leftover_noise=True))
