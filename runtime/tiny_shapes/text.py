"""The text side: a word-level tokenizer and a small frozen UMT5 encoder, in the layout that Wan pipelines load."""

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from .scenes import BACKGROUNDS, COLOURS, MOTIONS, POSITIONS, SHAPES

LENGTH = 32
"""Rows of text that the transformer sees; unused ones are zero."""
EMBEDDING = 4096

_SPECIAL = ("<pad>", "</s>", "<unk>")
_COMMON = ("a", "on", "with", "background", "moving", ",")


def vocabulary() -> list[str]:
    """Every known word; the place in the list is the token id. Words not used in training are left unknown."""
    words = [*COLOURS, *BACKGROUNDS, *SHAPES, *POSITIONS, *MOTIONS, *_COMMON]
    return [*_SPECIAL, *dict.fromkeys(words)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Lower case, split at spaces and punctuation, one id for each word, </s> at the end."""
    ids = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", ids["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=LENGTH,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def build_text_encoder(seed: int = 0) -> UMT5EncoderModel:
    """A random encoder, to be left as it is: its words are far apart, and context moves them a little."""
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=len(vocabulary()),
        d_model=EMBEDDING,
        d_kv=32,
        num_heads=2,
        d_ff=64,
        num_layers=1,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return UMT5EncoderModel(config).eval().requires_grad_(False)


@torch.no_grad()
def encode_prompts(tokenizer: PreTrainedTokenizerFast, text_encoder: UMT5EncoderModel, prompts: list[str]) -> Tensor:
    """(B, LENGTH, EMBEDDING) as Wan's pipelines make it: rows of padding are zero."""
    tokens = tokenizer(prompts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    hidden = text_encoder(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
    return hidden * tokens.attention_mask[..., None].to(hidden.dtype)
