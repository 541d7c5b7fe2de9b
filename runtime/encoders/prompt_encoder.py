"""What one text encoder makes of a prompt, as ComfyUI has it for the family: layer, masks, weights, templates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..families.texts import TextUse
from .prompts import Prompt, read_prompt
from .tokens import Tokenizer

TURN, USER, NEW_LINE = 151644, 872, 198
"""Words of Qwen's tokenizer: the start of a turn, and those that open the user's."""


class Encoded(NamedTuple):
    """What becomes of a prompt, float32 on the processor: `tokens` `(1, L, D)`, `pooled` `(1, D)`, and the `mask` `(1, L)` that
    is 1 where there are words; each None where the family does not read it.
    """

    tokens: torch.Tensor | None
    pooled: torch.Tensor | None
    mask: torch.Tensor | None


class PromptEncoder:
    """How a family reads one of its encoders, whose tokenizer this is."""

    def __init__(self, use: TextUse, tokenizer: Tokenizer) -> None:
        self.use, self._tokenizer = use, tokenizer

    def read(self, text: str) -> Prompt:
        """The prompt in numbers. Raises `Refused`."""
        return read_prompt(text, self.use, self._tokenizer)

    def encode(self, prompt: Prompt, model: nn.Module, *, device: torch.device) -> Encoded:
        """What the encoder, which is on the device, makes of it."""
        use, rows = self.use, prompt.rows
        ids = torch.tensor(rows[:1] if use.gives == "pooled" else rows, device=device)
        mask = torch.tensor([self._words_of(row) for row in ids.tolist()], device=device)
        output = model(input_ids=ids, attention_mask=mask if use.masked else None, output_hidden_states=bool(use.layer))
        pooled = None if use.gives == "tokens" else _pooled(output)[:1].float().cpu()
        if use.gives == "pooled":
            return Encoded(None, pooled, None)
        hidden = output.hidden_states[use.layer] if use.layer else output.last_hidden_state
        hidden = hidden.float() * mask.unsqueeze(-1) if use.zeroed else hidden.float()
        tokens, mask = _weighed(hidden, prompt), mask[: len(prompt.sections)].flatten()
        start = _user_turn(rows[0]) if use.after_template else 0
        told = use.tells_mask and not (use.after_template and mask[start:].all())
        return Encoded(tokens[None, start:].cpu(), pooled, mask[None, start:].cpu() if told else None)

    def _words_of(self, row: list[int]) -> list[int]:
        """1 for each word up to the end of the text with that, or to the filling where there is no end; 0 for the rest."""
        end = self._tokenizer.end
        stop = self._tokenizer.padding if end is None else end
        count = len(row) if stop not in row else row.index(stop) + (end is not None)
        return [1] * count + [0] * (len(row) - count)


def _pooled(output: Any) -> torch.Tensor:
    """Of each row one vector, projected where the class does that."""
    return output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output


def _weighed(hidden: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """The sections one behind the other, each token as far from that of an empty prompt as its weight says: `(L, D)`."""
    if prompt.blank:
        weights = hidden.new_tensor(prompt.weights).unsqueeze(-1)
        sections, blank = hidden[:-1], hidden[-1:]
        hidden = torch.where(weights == 1.0, sections, (sections - blank) * weights + blank)
    return hidden.flatten(0, 1)


def _user_turn(ids: list[int]) -> int:
    """Where what the user says begins, behind the second start of a turn."""
    turns = [place for place, number in enumerate(ids) if number == TURN][:2]
    start = turns[-1] if turns else -1
    opens = len(ids) > start + 3 and ids[start + 1 : start + 3] == [USER, NEW_LINE]
    return start + 3 if opens else start
