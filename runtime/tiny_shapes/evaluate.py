"""Score the model: `python -m runtime.tiny_shapes.evaluate [--folder DIR] [--pictures DIR]`.

Prompts whose combination of colour, shape and background was never drawn in training, fixed seeds, 20 Euler steps at
shift 8 and guidance 5; what came out is read by the pixel check.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from . import MODEL_FOLDER
from .autoencoder import decode_clips, encode_clips
from .autoencoder_training import clip_batch, picture_batch
from .check import centre_of, inspect
from .sampling import Model, load_model, sample_latents, to_frames
from .scenes import FRAMES, HELD_OUT, HELD_OUT_CLIPS, MOTIONS, POSITIONS, SIZE, parse_prompt

BATCH = 8


@dataclass(frozen=True)
class Verdict:
    """Which of the things that a prompt asks for were seen."""

    prompt: str
    colour: bool
    shape: bool
    background: bool
    place: bool

    @property
    def right(self) -> bool:
        """Colour, shape and background; the place is reported beside it."""
        return self.colour and self.shape and self.background


def judge(prompt: str, frames: np.ndarray) -> Verdict:
    """Read frames (T, H, W, 3) and compare with the prompt; every third frame has to be right."""
    scene = parse_prompt(prompt)
    try:
        seen = [inspect(frame) for frame in frames[::3]]
        place = _is_moving(scene.motion, frames) if scene.motion else _is_placed(scene.position, frames[0])
    except ValueError:
        return Verdict(prompt, False, False, False, False)
    right = np.array([[value == wanted for value, wanted in zip(one, scene.combination, strict=True)] for one in seen])
    return Verdict(prompt, *(bool(attribute) for attribute in right.all(axis=0)), place)


def _is_placed(position: str, frame: np.ndarray) -> bool:
    """The centre is nearer to this place than to any other."""
    centre = np.array(centre_of(frame))
    return min(POSITIONS, key=lambda name: float(np.linalg.norm(centre - np.array(POSITIONS[name])))) == position


def _is_moving(motion: str, frames: np.ndarray) -> bool:
    """From first to last frame the shape goes at least 15 % of the picture, and mostly this way."""
    way = np.array(centre_of(frames[-1])) - np.array(centre_of(frames[0]))
    along = float(way @ np.array(MOTIONS[motion], float))
    return along > 0.15 and along > 0.8 * float(np.linalg.norm(way))


def generate(model: Model, prompts: list[str], *, frames: int = 1, seed: int = 0) -> np.ndarray:
    """(B, T, H, W, 3) from 0 to 1, a few prompts at a time."""
    size = BATCH if frames == 1 else 2
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return np.concatenate(
        [
            to_frames(model, sample_latents(model, group, frames=frames, seed=seed + size * index))
            for index, group in enumerate(groups)
        ]
    )


@torch.no_grad()
def autoencoder_psnr(model: Model) -> tuple[float, float]:
    """Decibels of encoding and decoding unseen pictures and clips, from the mean squared error of all of them."""
    random = np.random.default_rng(99)

    def psnr(pixels: torch.Tensor) -> float:
        decoded = decode_clips(model.autoencoder, encode_clips(model.autoencoder, pixels))
        return float(10 * torch.log10(4 / (decoded - pixels).square().mean()))

    return psnr(picture_batch(random, 32, SIZE)), psnr(clip_batch(random, 4, SIZE))


def table(title: str, verdicts: list[Verdict]) -> str:
    """One line for each failure, then the counts."""
    lines = []
    for verdict in verdicts:
        if not verdict.right or not verdict.place:
            wrong = [name for name in ("colour", "shape", "background", "place") if not getattr(verdict, name)]
            lines.append(f"  wrong {', '.join(wrong)}: {verdict.prompt}")
    total = len(verdicts)
    counts = {name: sum(getattr(v, name) for v in verdicts) for name in ("colour", "shape", "background", "place")}
    return "\n".join([*lines, f"{title}: {sum(v.right for v in verdicts)} of {total} right; {counts}\n"])


def save_frames(folder: Path, name: str, frames: np.ndarray) -> None:
    """A contact sheet: one row for each prompt with its frames from left to right, rows of eight for stills."""
    strips = [np.concatenate(list(one), axis=1) for one in frames]
    across = 8 if frames.shape[1] == 1 else 1
    rows = [np.concatenate(strips[start : start + across], axis=1) for start in range(0, len(strips), across)]
    Image.fromarray((np.concatenate(rows) * 255).round().astype(np.uint8)).save(folder / f"{name}.png")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Score the tiny model on prompts held out of its training.")
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--pictures", type=Path, help="write contact sheets into this folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.folder)
    sys.stdout.write("autoencoder: {:.1f} dB on pictures, {:.1f} dB on clips\n".format(*autoencoder_psnr(model)))
    for title, prompts, frames in (("pictures", HELD_OUT, 1), ("clips", HELD_OUT_CLIPS, FRAMES)):
        made = generate(model, list(prompts), frames=frames, seed=options.seed)
        sys.stdout.write(table(title, [judge(prompt, one) for prompt, one in zip(prompts, made, strict=True)]))
        if options.pictures:
            save_frames(options.pictures, title, made)


if __name__ == "__main__":
    main()
