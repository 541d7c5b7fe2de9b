"""A prompt as rows of words for an encoder, with the weights that ComfyUI's `(word:1.2)` gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import Refused
from ..families.texts import TextUse
from .tokens import Tokenizer

MOST_TOKENS = 4096
"""Of a prompt; eight times what the models were trained on. Attention's memory grows with the square."""
RAISED = 1.1
"""What parentheses without a number multiply a weight by."""
MOST_NESTED = 64
KEPT_WHOLE = 8
"""A run of fewer words of one weight is not parted between two sections."""
ESCAPED = (("\\)", "\0\1"), ("\\(", "\0\2"))
"""A parenthesis that is meant as one, and what stands for it while weights are looked for."""
EMBEDDING = re.compile(r"(?<![^\s(])embedding:")

Words = list[tuple[int, float]]
"""Numbers of words, and how much each counts."""


@dataclass(frozen=True)
class Prompt:
    """Its sections as rows of words, `(number, weight)`, all of one length; and an empty prompt of that length, where a
    weight is not 1.
    """

    sections: list[Words]
    blank: list[int]

    @property
    def rows(self) -> list[list[int]]:
        """What the encoder is given."""
        return [[number for number, _ in section] for section in self.sections] + ([self.blank] if self.blank else [])

    @property
    def weights(self) -> list[list[float]]:
        """Of each word of each section."""
        return [[weight for _, weight in section] for section in self.sections]


def read_prompt(text: str, use: TextUse, tokenizer: Tokenizer) -> Prompt:
    """The rows of a prompt for an encoder. Raises `Refused` for one that is too long, or asks for what is not there."""
    if EMBEDDING.search(text):
        raise Refused(
            "the prompt names an embedding (embedding:...), which is not read here: use CLIP Text Encode for it"
        )
    if not text.startswith(use.own_templates):
        text = use.template.replace("{}", text)
    runs = [[(number, weight) for number in tokenizer.ids(part)] for part, weight in _parts(text, use)]
    total = sum(map(len, runs)) + (tokenizer.end is not None)
    if total > MOST_TOKENS:
        raise Refused(f"the prompt has {total} tokens: shorten it to {MOST_TOKENS} or less")
    around = sum(each is not None for each in (tokenizer.start, tokenizer.end))
    sections = [_row(words, use, tokenizer) for words in _sections(runs, use.section - around if use.section else 0)]
    weighed = any(weight != 1.0 for section in sections for _, weight in section)
    return Prompt(sections, _blank(len(sections[0]), use, tokenizer) if weighed else [])


def weighted_parts(text: str) -> list[tuple[str, float]]:
    """The parts of a text and how much each counts, as ComfyUI reads `(word)` and `(word:1.2)`, also within one another.

    Raises `Refused` for parentheses too many within one another, or a weight that is no number.
    """
    return list(_weighted(text, 1.0, 0))


def _parts(text: str, use: TextUse) -> list[tuple[str, float]]:
    for written, stand_in in ESCAPED:
        text = text.replace(written, stand_in)
    parts = weighted_parts(text) if use.weighted else [(text, 1.0)]
    for written, stand_in in ESCAPED:
        parts = [(part.replace(stand_in, written[1]), weight) for part, weight in parts]
    return [each for each in parts if each[0]]


def _weighted(text: str, weight: float, nested: int) -> Iterator[tuple[str, float]]:
    if nested > MOST_NESTED:
        raise Refused(
            f"the prompt has more than {MOST_NESTED} parentheses within one another: write a weight, (word:1.5)"
        )
    for part in _groups(text):
        if len(part) < 2 or part[0] != "(" or part[-1] != ")":
            yield part, weight
            continue
        inside, raised = part[1:-1], weight * RAISED
        words, colon, number = inside.rpartition(":")
        given = _number(number) if colon and words else None
        yield from _weighted(inside, raised, nested + 1) if given is None else _weighted(words, given, nested + 1)


def _groups(text: str) -> Iterator[str]:
    """The text in and between the outermost parentheses; one that is never closed goes to the end."""
    start = depth = 0
    for place, letter in enumerate(text):
        if letter == "(":
            if depth == 0 and place > start:
                yield text[start:place]
                start = place
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth == 0:
                yield text[start : place + 1]
                start = place + 1
    if text[start:]:
        yield text[start:]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        raise Refused("a weight of the prompt is no number that can be used: write one such as (word:1.2)")
    return number


def _sections(runs: list[Words], room: int) -> list[Words]:
    """The words in sections of so many at most; room 0: in one."""
    sections: list[Words] = [[]]
    for run in runs:
        left = run
        while room and len(sections[-1]) + len(left) > room:
            taken = room - len(sections[-1]) if len(run) >= KEPT_WHOLE else 0
            sections[-1] += left[:taken]
            left = left[taken:]
            sections.append([])
        sections[-1] += left
    return sections


def _row(words: Words, use: TextUse, tokenizer: Tokenizer) -> Words:
    """With what stands before and behind a text, filled up."""
    start = [(tokenizer.start, 1.0)] if tokenizer.start is not None else []
    end = [(tokenizer.end, 1.0)] if tokenizer.end is not None else []
    row = [*start, *words, *end]
    return row + [(tokenizer.padding, 1.0)] * (min(use.length, tokenizer.length) - len(row))


def _blank(length: int, use: TextUse, tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.end if use.blank_end else None
    row = [number for number in (tokenizer.start, end) if number is not None]
    return row + [tokenizer.padding] * (length - len(row))
