"""The classes of transformers that the text encoders are, built without weights from the shapes in their files.

What shapes do not say is the same for all files of a kind: it is written here, from the configurations that were published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)  # fmt: skip

from ..families.cuts import LinearShard, TensorSplit

Shapes = Mapping[str, tuple[int, ...]]
T5_ATTENTION, T5_FEED_FORWARD = "encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"
T5_LAYER = r"encoder\.block\.\d+\.layer"
CLIP_LAYER = r"(text_model\.)?encoder\.layers\.\d+"
CLIP_HEAD, CLIP_START, CLIP_END = 64, 49406, 49407
QWEN_HEAD, QWEN_PADDING, QWEN_THETA, QWEN_EPSILON = 128, 151643, 1e6, 1e-6
GEMMA_HEAD, GEMMA_THETA, GEMMA_START = 256, 1e4, 2
LONGEST = 40960
"""Places of a text; more than a prompt may have."""


@dataclass(frozen=True)
class Cut:
    """How an encoder is cut over ranks: the Linears of its attentions and the others, how many heads cannot be parted further
    (0: none is dealt out), and how wide one is.
    """

    attention: tuple[LinearShard, ...]
    others: tuple[LinearShard, ...]
    heads: int
    head_dim: int

    def over(self, degree: int) -> Cut:
        """The same over so many ranks. With more of them than heads each has its part of the matrices of an attention, puts
        together what all make with theirs, and has every head.
        """
        if degree <= self.heads:
            return self
        gathered = tuple(replace(shard, mode="gather", together=1) for shard in self.attention)
        return Cut(gathered, self.others, heads=0, head_dim=1)

    @property
    def split(self) -> TensorSplit:
        """The cut of its Linears."""
        return TensorSplit(linears=self.attention + self.others)


@dataclass(frozen=True)
class EncoderClass:
    """A class of transformers, its configuration by the shapes in a file, the names of its table of words (several names of
    one), where its blocks are and how it is cut.

    `tokenizer` is what `Tokenizer.from_folder` is told of its tokenizer, and `pieces` what `from_pieces` is.
    """

    model_class: type[nn.Module]
    config_from: Callable[[Shapes], Any]
    words: tuple[str, ...]
    blocks: str
    cut: Callable[[Any], Cut]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    pieces: Mapping[str, int | None] = field(default_factory=dict)


def blocks_of(model: nn.Module, kind: str) -> list[nn.Module]:
    """The layers of an encoder, in their order."""
    pattern = CLASSES[kind].blocks
    return [module for name, module in model.named_modules() if re.fullmatch(rf"(text_model\.)?{pattern}\.\d+", name)]


def fill_tables(model: nn.Module) -> None:
    """Make anew, on the processor, what an encoder that was built without weights works out and no file has."""
    for name, module in list(model.named_modules()):
        tables = dict(module.named_buffers(recurse=False))
        if "inv_freq" in tables:
            model.set_submodule(name, type(module)(config=module.config))
        elif "embed_scale" in tables:
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
        elif "position_ids" in tables:
            module.position_ids = torch.arange(tables["position_ids"].shape[-1]).expand(1, -1)


def _t5(config_class: type, shapes: Shapes) -> Any:
    words, width = shapes["shared.weight"]
    buckets, heads = shapes[f"{T5_ATTENTION}.relative_attention_bias.weight"]
    features, hidden = shapes[f"{T5_ATTENTION}.q.weight"][0], shapes[f"{T5_FEED_FORWARD}.wi_0.weight"][0]
    return config_class(
        vocab_size=words, d_model=width, d_kv=features // max(1, heads), d_ff=hidden, num_layers=_layers(shapes),
        num_heads=heads, relative_attention_num_buckets=buckets, feed_forward_proj="gated-gelu", dropout_rate=0.0,
    )  # fmt: skip


def _clip(shapes: Shapes, *, hidden_act: str) -> CLIPTextConfig:
    words, width = shapes["embeddings.token_embedding.weight"]
    return CLIPTextConfig(
        vocab_size=words, hidden_size=width, intermediate_size=shapes["encoder.layers.0.mlp.fc1.weight"][0],
        num_hidden_layers=_layers(shapes), num_attention_heads=width // CLIP_HEAD, hidden_act=hidden_act,
        projection_dim=shapes.get("text_projection.weight", (width,))[0],
        max_position_embeddings=shapes["embeddings.position_embedding.weight"][0],
        bos_token_id=CLIP_START, eos_token_id=CLIP_END, pad_token_id=CLIP_END,
    )  # fmt: skip


def _qwen(config_class: type, shapes: Shapes) -> Any:
    return config_class(
        **_decoder(shapes, QWEN_HEAD), rope_theta=QWEN_THETA, rms_norm_eps=QWEN_EPSILON, max_position_embeddings=LONGEST,
    )  # fmt: skip


def _gemma2(shapes: Shapes) -> Gemma2Config:
    """ComfyUI leaves out the caps of Gemma's scores, and so do we."""
    return Gemma2Config(
        **_decoder(shapes, GEMMA_HEAD), rope_theta=GEMMA_THETA, rms_norm_eps=QWEN_EPSILON, attn_logit_softcapping=None,
        query_pre_attn_scalar=GEMMA_HEAD, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip


def _decoder(shapes: Shapes, head: int) -> dict[str, Any]:
    """What all decoders that only read are told by their shapes."""
    words, width = shapes["embed_tokens.weight"]
    return {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": _layers(shapes),
        "head_dim": head,
        "num_attention_heads": shapes["layers.0.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes["layers.0.self_attn.k_proj.weight"][0] // head,
        "use_cache": False,
    }


def _layers(shapes: Shapes) -> int:
    return len({found[1] for name in shapes if (found := re.match(r"(?:encoder\.)?(?:layers|block)\.(\d+)\.", name))})


def _cut_t5(config: Any) -> Cut:
    attention = (
        LinearShard(rf"{T5_LAYER}\.0\.SelfAttention\.[qkv]", "column"),
        LinearShard(rf"{T5_LAYER}\.0\.SelfAttention\.o", "row"),
    )
    others = (
        LinearShard(rf"{T5_LAYER}\.1\.DenseReluDense\.wi(_[01])?", "column"),
        LinearShard(rf"{T5_LAYER}\.1\.DenseReluDense\.wo", "row"),
    )
    return Cut(attention, others, config.num_heads, config.d_kv)


def _cut_clip(config: Any) -> Cut:
    """No head is dealt out: before transformers 5 its class takes the width of all for that of its attention's output."""
    attention = (LinearShard(rf"{CLIP_LAYER}\.self_attn\.([qkv]|out)_proj", "gather"),)
    others = (LinearShard(rf"{CLIP_LAYER}\.mlp\.fc1", "column"), LinearShard(rf"{CLIP_LAYER}\.mlp\.fc2", "row"))
    return Cut(attention, others, heads=0, head_dim=1)


def _cut_decoder(config: Any) -> Cut:
    """The queries of a key stay with it."""
    heads = config.num_key_value_heads
    together = config.num_attention_heads // heads
    layer = r"layers\.\d+"
    attention = (
        LinearShard(rf"{layer}\.self_attn\.q_proj", "column", together=together),
        LinearShard(rf"{layer}\.self_attn\.[kv]_proj", "column"),
        LinearShard(rf"{layer}\.self_attn\.o_proj", "row", together=together),
    )
    others = (
        LinearShard(rf"{layer}\.mlp\.(gate|up)_proj", "column"),
        LinearShard(rf"{layer}\.mlp\.down_proj", "row"),
    )
    return Cut(attention, others, heads, config.head_dim)


T5_WORDS, DECODER_WORDS = ("shared", "encoder.embed_tokens"), ("embed_tokens",)
CLIP_WORDS = ("embeddings.token_embedding",)
QWEN_TOKENIZER = {"kind": "Qwen2Tokenizer", "padding": QWEN_PADDING, "ends": False}
CLASSES: Mapping[str, EncoderClass] = {
    "umt5xxl": EncoderClass(UMT5EncoderModel, partial(_t5, UMT5Config), T5_WORDS, r"encoder\.block", _cut_t5),
    "t5xxl": EncoderClass(
        T5EncoderModel, partial(_t5, T5Config), T5_WORDS, r"encoder\.block", _cut_t5,
        {"kind": "T5TokenizerFast", "padding": 0},
    ),
    "clip_l": EncoderClass(
        CLIPTextModel, partial(_clip, hidden_act="quick_gelu"), CLIP_WORDS, r"encoder\.layers", _cut_clip,
        {"kind": "CLIPTokenizer", "padding": CLIP_END, "starts": True},
    ),
    "clip_g": EncoderClass(
        CLIPTextModelWithProjection, partial(_clip, hidden_act="gelu"), CLIP_WORDS, r"encoder\.layers", _cut_clip,
        {"kind": "CLIPTokenizer", "padding": 0, "starts": True},
    ),
    "gemma2_2b": EncoderClass(
        Gemma2Model, _gemma2, DECODER_WORDS, "layers", _cut_decoder, pieces={"start": GEMMA_START, "end": None}
    ),
    "qwen3_4b": EncoderClass(
        Qwen3Model, partial(_qwen, Qwen3Config), DECODER_WORDS, "layers", _cut_decoder, QWEN_TOKENIZER
    ),
    "qwen25_7b": EncoderClass(
        Qwen2Model, partial(_qwen, Qwen2Config), DECODER_WORDS, "layers", _cut_decoder, QWEN_TOKENIZER
    ),
}  # fmt: skip
"""By kind. Qwen2.5-VL's language model is Qwen2 where there is text alone: the three numbers of a place are then one."""
