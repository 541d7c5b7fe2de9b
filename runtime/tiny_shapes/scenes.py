"""Scenes: one coloured shape on a plain background, as data, as a prompt and as pixels."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 40),
    "magenta": (210, 50, 200),
    "cyan": (40, 200, 210),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (16, 16, 16),
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "brown": (110, 66, 28),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")
POSITIONS: dict[str, tuple[float, float]] = {
    "center": (0.5, 0.5),
    "left": (0.29, 0.5),
    "right": (0.71, 0.5),
    "top": (0.5, 0.29),
    "bottom": (0.5, 0.71),
}
MOTIONS: dict[str, tuple[float, float]] = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}

SIZE = 128
"""Native width and height in pixels."""
FRAMES = 9
"""Native length of a clip."""
TRAVEL = 0.4
"""The way a moving shape goes in one clip, as a fraction of the picture."""

Combination = tuple[str, str, str]


@dataclass(frozen=True)
class Scene:
    """What is to be seen. Lengths are fractions of the picture's width."""

    colour: str
    shape: str
    background: str
    position: str = "center"
    motion: str = ""
    radius: float = 0.22
    jitter: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for word, known in (
            (self.colour, COLOURS),
            (self.shape, SHAPES),
            (self.background, BACKGROUNDS),
            (self.position, POSITIONS),
            (self.motion or "right", MOTIONS),
        ):
            if word not in known:
                raise ValueError(f"{word!r} is not one of {', '.join(known)}")

    @property
    def combination(self) -> Combination:
        """Colour, shape and background: what the pixel check reads back."""
        return self.colour, self.shape, self.background

    def centre(self, moment: float) -> tuple[float, float]:
        """Centre of the shape at `moment`, from 0 (first frame) to 1 (last frame)."""
        x, y = POSITIONS["center" if self.motion else self.position]
        step_x, step_y = MOTIONS[self.motion] if self.motion else (0.0, 0.0)
        way = (moment - 0.5) * TRAVEL
        return x + step_x * way + self.jitter[0], y + step_y * way + self.jitter[1]


# Word order and length vary, so that the model reads words, not places. {where} is empty, a position or a motion.
STILL_TEMPLATES: tuple[str, ...] = (
    "a {colour} {shape} on a {background} background{where}",
    "{colour} {shape}, {background} background{where}",
    "a {background} background with a {colour} {shape}{where}",
    "{colour} {shape} on {background}{where}",
    "a photo of a {colour} {shape} on a {background} background{where}",
)
MOVING_TEMPLATES: tuple[str, ...] = (
    "a {colour} {shape} moving {motion} on a {background} background",
    "{colour} {shape} moving {motion}, {background} background",
    "a {background} background with a {colour} {shape} moving {motion}",
    "a video of a {colour} {shape} moving {motion} on a {background} background",
)


def all_combinations() -> list[Combination]:
    """Every colour, shape and background, in a fixed order."""
    return list(product(COLOURS, SHAPES, BACKGROUNDS))


def _is_held_out(combination: Combination) -> bool:
    """One in five, chosen so that every pair of two words still occurs in training."""
    colour, shape, background = combination
    index = list(COLOURS).index(colour) + 2 * SHAPES.index(shape) + list(BACKGROUNDS).index(background)
    return index % 5 == 0


HELD_OUT_COMBINATIONS: tuple[Combination, ...] = tuple(c for c in all_combinations() if _is_held_out(c))
TRAINING_COMBINATIONS: tuple[Combination, ...] = tuple(c for c in all_combinations() if not _is_held_out(c))


def format_prompt(scene: Scene, template: int = 0) -> str:
    """The scene as words; the place is left out when it is the center."""
    templates = MOVING_TEMPLATES if scene.motion else STILL_TEMPLATES
    where = "" if scene.position == "center" else f", {scene.position}"
    return templates[template % len(templates)].format(
        colour=scene.colour, shape=scene.shape, background=scene.background, motion=scene.motion, where=where
    )


def parse_prompt(prompt: str) -> Scene:
    """The scene a prompt names. Raises ValueError when colour, shape or background is missing."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()

    def named(known: object, what: str) -> str:
        found = [word for word in words if word in known]
        if not found:
            raise ValueError(f"{prompt!r} names no {what}: use one of {', '.join(known)}")
        return found[0]

    scene = Scene(named(COLOURS, "colour"), named(SHAPES, "shape"), named(BACKGROUNDS, "background"))
    if "moving" in words:
        return replace(scene, motion=named(MOTIONS, "direction"))
    return replace(scene, position=next((word for word in words if word in POSITIONS), "center"))


def _held_out_scene(index: int) -> Scene:
    combination = HELD_OUT_COMBINATIONS[index % len(HELD_OUT_COMBINATIONS)]
    return Scene(*combination, position=list(POSITIONS)[index % len(POSITIONS)])


HELD_OUT: tuple[str, ...] = tuple(format_prompt(_held_out_scene(index), index // 3) for index in range(40))
"""Forty prompts whose combinations were never drawn in training."""
HELD_OUT_CLIPS: tuple[str, ...] = tuple(
    format_prompt(Scene(*HELD_OUT_COMBINATIONS[index * 2], motion=list(MOTIONS)[index % 4]), index)
    for index in range(8)
)
"""Eight moving prompts of the same kind, two for each direction."""
CALIBRATION: tuple[str, ...] = tuple(
    format_prompt(
        Scene(*TRAINING_COMBINATIONS[index * 7 % len(TRAINING_COMBINATIONS)], list(POSITIONS)[index % 5]), index
    )
    for index in range(12)
)
"""Twelve prompts of combinations that were drawn in training, to make a quantised model from."""


def random_scene(
    random: np.random.Generator, *, moving: bool = False, combinations: tuple[Combination, ...] = TRAINING_COMBINATIONS
) -> Scene:
    """A scene with a random place (or direction), size and jitter."""
    combination = combinations[random.integers(len(combinations))]
    x, y = random.uniform(-0.01, 0.01, size=2)
    return Scene(
        *combination,
        position="center" if moving else list(POSITIONS)[random.integers(len(POSITIONS))],
        motion=list(MOTIONS)[random.integers(len(MOTIONS))] if moving else "",
        radius=float(random.uniform(0.2, 0.23)),
        jitter=(float(x), float(y)),
    )


def shape_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Distance from the outline, negative inside; y points down. The shape fills a square of side 2 radius."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(abs(x), abs(y)) - radius
    if shape == "triangle":
        sides = (2 * abs(x) - (y + radius)) / np.sqrt(5)
        return np.maximum(sides, y - radius)
    if shape == "cross":
        wide = np.maximum(abs(x) - radius, abs(y) - radius / 3)
        tall = np.maximum(abs(x) - radius / 3, abs(y) - radius)
        return np.minimum(wide, tall)
    raise ValueError(f"{shape!r} is not one of {', '.join(SHAPES)}")


def draw(scene: Scene, size: int = SIZE, moment: float = 0.0) -> np.ndarray:
    """The scene as pixels: (size, size, 3), float32 from 0 to 1, edges antialiased over one pixel."""
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = scene.centre(moment)
    distance = shape_distance(scene.shape, grid[None, :] - x, grid[:, None] - y, scene.radius)
    cover = np.clip(0.5 - distance * size, 0, 1)[..., None].astype(np.float32)
    front = np.array(COLOURS[scene.colour], np.float32) / 255
    back = np.array(BACKGROUNDS[scene.background], np.float32) / 255
    return front * cover + back * (1 - cover)


def draw_clip(scene: Scene, frames: int = FRAMES, size: int = SIZE) -> np.ndarray:
    """The scene over time: (frames, size, size, 3), float32 from 0 to 1."""
    return np.stack([draw(scene, size, moment) for moment in np.linspace(0, 1, frames)])
