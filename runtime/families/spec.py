"""What a family of models is to the engine: plain data, readable without torch or diffusers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .cuts import Activations, TensorSplit, TokenSplit
from .texts import TextUse
from .written import TILE, Fused, NunchakuFile, PackedLinear, Rebuilt, Shapes, Variant

CLEAN = "index_timestep_zero"
"""The way in which references have no noise."""


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


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One architecture. Names of tensors and modules are those of its class in diffusers; patterns fit them whole."""

    name: str
    title: str
    pipeline_classes: tuple[str, ...]
    transformer_class: str
    vae_class: str
    tiny: Mapping[str, Any]
    """A configuration for tests."""

    # Its files: how they are known, and how their names become those of the class
    signature: tuple[str, ...]
    """Tensors that every checkpoint of it has."""
    variants: tuple[Variant, ...]
    told_by: Callable[[Mapping[str, str]], bool] = lambda metadata: True
    """Whether the metadata of a file are those of this family, for families of the same tensors."""
    renames: tuple[tuple[str, str], ...]
    """(pattern, replacement) pairs, applied in order to every name of ComfyUI's and the original layout; they leave the
    class's own names as they are."""
    fused: tuple[Fused, ...] = ()
    """Layers of that layout for which a name is not enough, by their names after the renames."""
    rare: tuple[str, ...] = ()
    """Tensors that some of its models have, and the one of `tiny` has not."""
    unused: str = ""
    """A pattern of tensors, after the renames, that files have and nobody reads."""
    nunchaku: tuple[PackedLinear, ...] = ()
    """The 4-bit Linears that Nunchaku's files name in their own way or fuse."""
    nunchaku_file: NunchakuFile | None = None
    after_gelu: str = ""
    """A pattern of the Linears whose input is the output of a GELU."""

    # Its configuration; `heads` to `positions` are keys of it
    config_from: Callable[[Shapes], dict[str, Any]]
    unsupported_config: Callable[[Mapping[str, Any]], str]
    """What a configuration is when it is a relative that is not run."""
    heads: str
    layers: str
    text_width: str
    head_dim: str = ""
    width: str = ""
    """The width of all heads, where that is given and no `head_dim`."""
    pooled_width: str = ""
    """Where it reads a pooled prompt."""
    second_text_width: str = ""
    """Where it reads what a second text encoder says, token by token."""
    vision_width: str = ""
    """Where it reads what CLIP vision says of a picture."""
    guidance_key: str = ""
    """Where it says whether it is told a guidance, in a family of which not all models are."""
    positions: str = ""
    """Where it has a table of positions: how many patches that goes to along each dim."""

    # Its weights and how they are dealt over ranks
    blocks: tuple[str, ...]
    keep_float32: tuple[str, ...]
    rebuilt: tuple[Rebuilt, ...]
    in_model_dtype: str = ""
    """A pattern of the modules that are handed float32, and take the number format of their weights."""
    rounded_timestep: tuple[str, float] | None = None
    """A pattern of the modules that make waves of a timestep which the class has rounded to the number format of the model,
    and what it multiplies it by after that.
    """
    split: TokenSplit
    self_attention: str
    """A pattern of the modules whose attention runs over the split tokens."""
    tensor: TensorSplit
    activations: Activations | None = None

    # Its arguments
    inputs: tuple[tuple[str, str], ...]
    """Which argument is which field of a conditioning, or what is worked out for it: `image_ids` and `text_ids` are
    (number, row, column), `image_places` and `text_places` have the place in the text behind them, `image_shapes` counts
    patches, `whole_mask` is true for each token of the prompt, `word_mask` for each word, `second_mask` for each token of the
    second encoder."""
    latent_input: str = "hidden_states"
    time_input: str = "timestep"
    timestep_scale: float = 1000.0
    """What a sigma is multiplied by for the argument of the timestep."""
    levels: Literal["", "frame", "token"] = ""
    """Of what it is told the noise each, when not of the whole latent."""
    sees_kept_clean: bool = False
    """It sees what a noise mask keeps as it is, and not in as much noise as the rest, as in ComfyUI."""
    patch: tuple[int, ...]
    packed: bool = False
    """It takes patches of the latent as tokens, `(B, tokens, C * patch)`."""
    listed: bool = False
    """It takes lists, with an item of the batch each, and pictures of one frame."""
    picture_tokens: str = ""
    """The module that embeds the tokens of a picture beside those of the prompt."""
    beside: tuple[Literal["picture", "mask", "given frames", "given places"], ...] = ()
    """What it takes beside the channels of the latent."""
    references: tuple[str, ...] = ()
    """The ways in which reference latents can be placed, its own one first."""
    clean_references: str = ""
    """The attribute by which its class and blocks modulate the tokens of references as if they had no noise, where that way
    is asked for."""
    references_apart: int = 1
    """How far the numbers of two references are from one another."""
    refuses: tuple[tuple[str, str], ...] = ()
    """Fields of a conditioning that ComfyUI's class reads and this one cannot, each with the way out."""

    # Sampling
    prediction: Literal["velocity", "reversed velocity"]
    """With "velocity": denoised = x - sigma * output, and it is told sigma; with "reversed velocity": denoised = x + sigma * output,
    and it is told 1 - sigma."""
    shift: float
    sigma_table: int = 1000
    """How many noise levels ComfyUI keeps for it."""
    boundary: float = 0.0
    """Of an architecture that comes as a pair of experts: the sigma below which the one of low noise takes over."""

    # Its latent and its prompt
    latent: LatentFormat
    text_length: int
    text_fill: int = 0
    """How many tokens a prompt is filled up to, with zeros before it."""
    token_multiple: int = 1
    """What the model fills up the number of tokens of the picture to a multiple of, and that of the prompt."""
    text_encoders: str
    """What they are, and ComfyUI's nodes for them."""
    texts: tuple[TextUse, ...] = ()
    """How each is read; empty where it is not read here."""

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
