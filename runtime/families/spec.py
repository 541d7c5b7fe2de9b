"""What a family of models is to the engine: plain data, readable without torch or diffusers."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by name."""
TILE = 128
"""Rows of a tile of a 4-bit weight."""


@dataclass(frozen=True)
class LatentFormat:
    """The space the VAE of a family works in.

    `mean` and `std` are per channel, between the VAE's space and the model's. `rgb` and `rgb_bias` give a rough picture
    from a latent in model space: one row of (red, green, blue) per channel, of the latent with `shuffle` times as many rows
    and columns (and as many channels fewer) where a place stands for several. `preview_decoder` is what the file of its
    small decoder is named in `models/vae_approx`, as in ComfyUI.
    """

    channels: int
    dims: Literal[2, 3]
    spatial: int
    temporal: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rgb: tuple[tuple[float, float, float], ...]
    rgb_bias: tuple[float, float, float]
    preview_decoder: str = ""
    shuffle: int = 1


@dataclass(frozen=True)
class Variant:
    """A relative that is told apart but not run: its name, and a tensor name (after renaming) that gives it away."""

    name: str
    tensor: str


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
    go over the tokens of one stream, and that stream.
    """

    split: tuple[TokenPlace, ...]
    gathered: tuple[TokenPlace, ...]
    masks: tuple[TokenPlace, ...] = ()
    joined: tuple[str, ...] = ()
    alone: tuple[tuple[str, str], ...] = ()


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
    """The two moments of a block at which most is held: inside the MLP, and at attention but for the query, key and value
    and what their exchange adds.
    """

    mlp: Moment
    attention: Moment


@dataclass(frozen=True)
class PackedLinear:
    """A 4-bit Linear of Nunchaku's files: its name there, and the Linears of the class of which it has the rows one after
    the other; `{}` stands for the number of the block. `part` is the place of its inputs among the parts of the inputs of
    the one Linear that it belongs to, where it has only those.
    """

    stored: str
    linears: tuple[str, ...]
    part: int | None = None


@dataclass(frozen=True)
class NunchakuFile:
    """How Nunchaku's own files of a family are written (github.com/nunchaku-tech/nunchaku).

    `model_class` is its class there, `modulation` a pattern of the Linears of which the weight alone is in 4 bits, `renames`
    lead from the class's names of plain tensors to the file's, and `comfy_config` works out what its nodes for ComfyUI
    want to know from the configuration. `first_names`: the tensors of a 4-bit Linear have their first names.
    """

    model_class: str
    modulation: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    first_names: bool = False
    comfy_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Rebuilt:
    """A module whose tables are computed, not stored: built again with these arguments, keys of the configuration or worked
    out from it.

    `stand_in` is a module of ours that takes its place, for the rounding or the positions of ComfyUI.
    """

    module: str
    arguments: tuple[tuple[str, str | Callable[[Mapping[str, Any]], Any]], ...]
    stand_in: Literal["", "timestep waves", "centred positions", "axis positions"] = ""


@dataclass(frozen=True)
class Fused:
    """A layer of the original layout whose rows lie otherwise in the class: fused there, or in another order.

    `pattern` is one of its name, without `weight` or `bias`. Its rows are blocks of the relative sizes `blocks`; each of
    `parts` is a layer of the class, by the replacement for the pattern, and the blocks that make it up, in their order.
    `unless` is a tensor, by the same replacement, whose presence says that the layer lies otherwise there.
    """

    pattern: str
    blocks: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    unless: str = ""

    def match(self, layer: str, there: Container[str]) -> re.Match[str] | None:
        """The match of a layer that lies so, in a model of which these tensors are there."""
        found = re.fullmatch(self.pattern, layer)
        return None if found and self.unless and found.expand(self.unless) in there else found


@dataclass(frozen=True)
class FamilySpec:
    """One architecture.

    `renames` are (pattern, replacement) pairs, applied in order to every name of ComfyUI's and the original layout; they
    leave diffusers' own names as they are; `fused` are the layers of that layout for which a name is not enough, after the
    renames. `signature` are tensors (diffusers' names) every checkpoint of it has.
    `config_from` works out the configuration of the class from the shapes (diffusers' names), and `unsupported_config`
    names what a configuration is when it is a relative that is not run. `heads`, `head_dim`, `layers` and `text_width`
    are keys of the configuration; where that says the width of all heads, `width` is its key and there is no `head_dim`.
    `unused` is a pattern of tensors (after the renames) that files have and nobody reads. `self_attention` is a pattern of the modules whose attention runs over the split
    tokens; `tensor` says how the weights are cut. `inputs` says which argument of the model is which field of a
    conditioning, or what is worked out for it: `image_ids` and `text_ids` are (number, row, column), `image_places` and
    `text_places` have the place in the text behind them, `image_shapes` counts patches,
    `whole_mask` is true for each word; `latent_input` and `time_input`
    are the arguments of the latent and the timestep. `prediction` "velocity": denoised = x - sigma * output, and the model
    is told sigma * `timestep_scale`; "reversed velocity": denoised = x + sigma * output, and it is told 1 - sigma.
    `sigma_table` is how many noise levels ComfyUI keeps for it. `packed`: the model takes patches of the latent as tokens,
    `(B, tokens, C * patch)`; `listed`: it takes lists, with an item of the batch each, and pictures of one frame. `pooled_width`, where it reads a pooled prompt, is a key of
    the configuration; so is `positions`, where the model has a table of them: how many patches it goes to along each dim.
    `references` are the ways in which reference latents can be placed, its own one first, with their numbers so far
    `references_apart`; `text_fill` is how many tokens a prompt is filled up to, with zeros before it; `refuses` are fields of
    a conditioning that ComfyUI's class reads and this one cannot, each with the way out; and `beside` is what it takes
    beside the channels of the latent. `text_encoders` says, where the model's own cannot be used yet, what they are and the
    way out. `nunchaku` are the 4-bit Linears that Nunchaku's files name in their own way or fuse, `nunchaku_file` the rest of how it writes them; `after_gelu` is a pattern
    of those whose input is the output of a GELU. `boundary`, for an architecture that comes as a pair of experts, is the
    sigma below which the one of low noise takes over. `picture_tokens` is the module that embeds the tokens of a picture
    beside those of the prompt. With `levels` the model is told the noise of each frame or token, and sees what a mask keeps
    as it is. `told_by` is whether the metadata of a file are those of this family, for families of the same tensors.
    """

    name: str
    title: str
    pipeline_classes: tuple[str, ...]
    transformer_class: str
    signature: tuple[str, ...]
    variants: tuple[Variant, ...]
    renames: tuple[tuple[str, str], ...]
    config_from: Callable[[Shapes], dict[str, Any]]
    unsupported_config: Callable[[Mapping[str, Any]], str]
    heads: str
    layers: str
    text_width: str
    blocks: tuple[str, ...]
    split: TokenSplit
    self_attention: str
    tensor: TensorSplit
    patch: tuple[int, ...]
    inputs: tuple[tuple[str, str], ...]
    keep_float32: tuple[str, ...]
    rebuilt: tuple[Rebuilt, ...]
    prediction: Literal["velocity", "reversed velocity"]
    shift: float
    latent: LatentFormat
    vae_class: str
    text_length: int
    tiny: Mapping[str, Any]
    head_dim: str = ""
    width: str = ""
    latent_input: str = "hidden_states"
    time_input: str = "timestep"
    listed: bool = False
    unused: str = ""
    nunchaku: tuple[PackedLinear, ...] = ()
    nunchaku_file: NunchakuFile | None = None
    after_gelu: str = ""
    pooled_width: str = ""
    positions: str = ""
    packed: bool = False
    timestep_scale: float = 1000.0
    sigma_table: int = 1000
    references: tuple[str, ...] = ()
    references_apart: int = 1
    text_fill: int = 0
    refuses: tuple[tuple[str, str], ...] = ()
    beside: tuple[Literal["picture", "mask", "given frames"], ...] = ()
    text_encoders: str = ""
    fused: tuple[Fused, ...] = ()
    boundary: float = 0.0
    picture_tokens: str = ""
    activations: Activations | None = None
    levels: Literal["", "frame", "token"] = ""
    told_by: Callable[[Mapping[str, str]], bool] = lambda metadata: True

    def head_dim_of(self, config: Mapping[str, Any]) -> int:
        """How wide a head of the model is."""
        return config[self.head_dim] if self.head_dim else config[self.width] // config[self.heads]

    def packed_linears(self, linears: Mapping[str, int]) -> dict[str, PackedLinear]:
        """The 4-bit Linears of a file of this family by their names there, of Linears of the class that have so many rows.

        Those that are no whole tiles are not fused, as no such file could be read.
        """
        waiting = {name: re.search(r"\.(\d+)\.", name) for name in linears if self.four_bit(name)}
        found: dict[str, PackedLinear] = {}
        for block in sorted({int(number[1]) for number in waiting.values() if number}):
            for packed in self.nunchaku:
                names = tuple(name.format(block) for name in packed.linears)
                fits = len(names) == 1 or not any(linears.get(name, 0) % TILE for name in names)
                if fits and waiting.keys() >= set(names):
                    found[packed.stored.format(block)] = replace(packed, linears=names)
        named = {name for packed in found.values() for name in packed.linears}
        return found | {name: PackedLinear(name, (name,)) for name in waiting if name not in named}

    def input_blocks(self, linear: str) -> tuple[int, ...]:
        """The relative sizes of the blocks of inputs of a Linear."""
        shards = (shard for shard in self.tensor.linears if shard.mode == "row")
        return next((shard.blocks for shard in shards if re.fullmatch(shard.pattern, linear)), (1,))

    def follows_gelu(self, linear: str) -> bool:
        """Whether the input of a Linear is the output of a GELU."""
        return bool(self.after_gelu and re.fullmatch(self.after_gelu, linear))

    def four_bit(self, linear: str) -> bool:
        """Whether a Linear may be held in 4 bits: one of a block that tensor parallel cuts in two halves of a pair, which
        leaves out modulation and whatever is near the input and the output.
        """
        halves = (shard for shard in self.tensor.linears if shard.mode in ("column", "row"))
        return self.in_block(linear) and any(re.fullmatch(shard.pattern, linear) for shard in halves)

    def has_linear(self, layer: str) -> bool:
        """Whether a layer with a matrix is a Linear, as far as that is known: those of the blocks are, and those that are cut."""
        return self.in_block(layer) or any(re.fullmatch(shard.pattern, layer) for shard in self.tensor.linears)

    def block_of(self, name: str) -> str:
        """The block that a tensor or a layer is in; empty for one outside of the blocks."""
        found = re.match(rf"(?:{'|'.join(map(re.escape, self.blocks))})\.\d+(?=\.)", name)
        return found[0] if found else ""

    def in_block(self, linear: str) -> bool:
        """Whether a Linear is one of a block."""
        return bool(self.block_of(linear))

    def stays_float32(self, name: str) -> bool:
        """Whether a tensor is held in float32, whatever number format is asked for."""
        return not set(self.keep_float32).isdisjoint(name.split("."))
