"""The pixel check: read colour, shape and background back from a picture, without any model."""

import numpy as np

from .scenes import BACKGROUNDS, COLOURS, SHAPES, Combination, shape_distance

_TEMPLATE = 48
"""Masks are compared at this many pixels a side."""


def inspect(image: np.ndarray) -> Combination:
    """Colour, shape and background of a picture (H, W, 3), float from 0 to 1.

    Raises ValueError when nothing stands out from the background.
    """
    border = border_colour(image)
    background = _nearest(border, BACKGROUNDS)
    mask = foreground(image)
    front = np.median(image[mask], axis=0)
    return _nearest(front, COLOURS), _nearest_shape(mask), background


def border_colour(image: np.ndarray) -> np.ndarray:
    """Median colour of the outermost pixels, (3,)."""
    width = max(1, image.shape[0] // 32)
    edges = [image[:width], image[-width:], image[:, :width].swapaxes(0, 1), image[:, -width:].swapaxes(0, 1)]
    return np.median(np.concatenate([edge.reshape(-1, 3) for edge in edges]), axis=0)


def foreground(image: np.ndarray) -> np.ndarray:
    """Pixels nearer to the shape's colour than to the background's, (H, W) bool.

    Raises ValueError when there are too few to be a shape.
    """
    border = border_colour(image)
    distance = np.linalg.norm(image - border, axis=-1)
    strongest = np.sort(distance, axis=None)[-max(4, distance.size // 50) :].mean()
    if strongest < 0.12:
        raise ValueError("nothing stands out from the background")
    mask = _largest_rows_and_columns(distance > strongest / 2)
    if mask.sum() < distance.size / 200:
        raise ValueError("too little stands out from the background")
    return mask


def centre_of(image: np.ndarray) -> tuple[float, float]:
    """Centre of the shape's bounding box as fractions of width and height."""
    top, bottom, left, right = _bounds(foreground(image))
    return (left + right) / 2 / image.shape[1], (top + bottom) / 2 / image.shape[0]


def _largest_rows_and_columns(mask: np.ndarray) -> np.ndarray:
    """Drop specks: rows and columns with next to nothing in them."""
    rows, columns = mask.sum(axis=1), mask.sum(axis=0)
    keep_rows = rows > max(1, rows.max() * 0.04)
    keep_columns = columns > max(1, columns.max() * 0.04)
    return mask & keep_rows[:, None] & keep_columns[None, :]


def _bounds(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Top, bottom, left, right of the true pixels; bottom and right exclusive."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _nearest(colour: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    return min(palette, key=lambda name: float(np.linalg.norm(colour - np.array(palette[name]) / 255)))


def _nearest_shape(mask: np.ndarray) -> str:
    """The shape whose outline, stretched to the mask's bounding box, overlaps it best."""
    top, bottom, left, right = _bounds(mask)
    index = (np.arange(_TEMPLATE) + 0.5) / _TEMPLATE
    rows = (top + index * (bottom - top)).astype(int)
    columns = (left + index * (right - left)).astype(int)
    cut = mask[np.ix_(rows, columns)]
    return max(SHAPES, key=lambda shape: _overlap(cut, _template(shape)))


def _template(shape: str) -> np.ndarray:
    grid = (np.arange(_TEMPLATE) + 0.5) / _TEMPLATE * 2 - 1
    return shape_distance(shape, grid[None, :], grid[:, None], 1.0) <= 0


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union."""
    return float((first & second).sum() / (first | second).sum())
