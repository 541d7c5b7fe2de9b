"""How a family is dealt over ranks, and what a rank then holds: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TokenPlace:
    """Tokens in a model: an argument of each module that the pattern `module` fits, or its output when none is named. Of an
    output that is a tuple that is each one, or number `item`.

    `stream` names the tokens; those of one stream are dealt to the ranks alike. They lie along `dim`, and those of the
    streams `behind` follow, each dealt by its own number. An argument without that dim is
    one for all tokens.
    """

    module: str
    argument: str = ""
    stream: str = "image"
    behind: tuple[str, ...] = ()
    dim: int = 1
    item: int | None = None


@dataclass(frozen=True)
class TokenSplit:
    """Where tokens are split over the ranks and put together again.

    `masks` are arguments that say which tokens of a stream may be attended to, `(B, S)`. Every rank has them whole: over
    several ranks they are kept from the model, and attention itself leaves those tokens out. For that `joined` says in
    which order a rank's tokens of the streams stand in attention. Where it is given, no rank is without a token of any
    stream: one that would be gets a filling, which attention leaves out too. `alone` are patterns of those attentions that
    go over the tokens of one stream, and that stream. `on_one_rank`: one rank does the same, where the class would make a mask
    of every query and every key.
    """

    split: tuple[TokenPlace, ...]
    gathered: tuple[TokenPlace, ...]
    masks: tuple[TokenPlace, ...] = ()
    joined: tuple[str, ...] = ()
    alone: tuple[tuple[str, str], ...] = ()
    on_one_rank: bool = False


@dataclass(frozen=True)
class LinearShard:
    """Linears that are cut over the tensor axis: a pattern of module names, and how.

    "column" keeps a part of the output features, "row" a part of the input features (its input is the output of a
    column), "gather" is a column whose output is put together at once. `blocks` are the relative sizes of what is fused
    in the cut features, such as (1, 4); each block is cut on its own. Of columns and rows so many heads stay `together`.
    """

    pattern: str
    mode: Literal["column", "row", "gather", "whole"]
    blocks: tuple[int, ...] = (1,)
    together: int = 1

    def grain(self, head_dim: int) -> int:
        """How many features are never parted."""
        return 1 if self.mode == "gather" else head_dim * self.together


@dataclass(frozen=True)
class TensorSplit:
    """How a family is cut over the tensor axis.

    `tables` is a pattern of modules whose outputs lie along the full width of a column's output, which are cut as that is.
    `norms` is a pattern of the RMSNorms over that width, `attentions` one of the modules whose
    `heads` become those of this rank (empty: there are none; the class takes its heads from the size of a head); so many of
    them stay `together`, since they share a key and a value.
    """

    linears: tuple[LinearShard, ...]
    attentions: str = ""
    norms: str = ""
    tables: str = ""
    together: int = 1


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment of a block, in tensors for all of its tokens: `whole` are as wide as the model;
    `cut` as wide as the heads and `hidden` as the inside of the MLP, both dealt over the tensor axis. `text` is how
    many as wide as the model there are for a token of the prompt, where that is not as much.
    """

    whole: float
    cut: float = 0.0
    hidden: float = 0.0
    text: float | None = None


@dataclass(frozen=True)
class Activations:
    """The moments of a block at which most is held: inside the MLP; at attention but for the query, key and value and what
    their exchange adds; and, of a model in fewer bits, where most is `widened` to float32, each of which counts as two.

    `undealt` as wide as the model are on every rank for all tokens of the picture, since they are made before those are
    dealt, as one is for those of a prompt that is dealt to a block; so are `tables` of their positions, in float32 whatever
    the number format, which count in no moment, and those as wide as a head: `head_tables`, the same for all items, and
    `item_tables`, of each its own. `float32` are as wide as the model for each of this rank's tokens of the picture at all of
    these moments, whatever the number format.

    `last` is what is held as the last Linear of the MLP is called, its input among that and its output not; where it is not
    given, one tensor less inside the MLP than at its widest moment. `first` is that of the first Linear, in place of the
    widest moment without what is hidden. `alone` is that at an attention of the picture alone, where blocks have one behind
    that of both. `referred` is the moment inside the MLP where references stand beside the picture
    without noise, if it is another. `of_text` is the widest moment of a long prompt, such as inside an MLP of its own; its
    `text` counts for the tokens of the picture.
    """

    mlp: Moment
    attention: Moment
    widened: Moment = Moment(0)
    undealt: float = 0.0
    tables: float = 0.0
    head_tables: float = 0.0
    item_tables: float = 0.0
    float32: float = 0.0
    alone: Moment | None = None
    referred: Moment | None = None
    of_text: Moment | None = None
    last: Moment | None = None
    first: Moment | None = None
