"""What a file is that holds no model of a family here, told by the name of one of its tensors: for the words of a refusal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from .layouts import PREFIXES


class Other(NamedTuple):
    """What it is, a pattern of a tensor that gives it away, and what to do with it; nothing where it is not run here."""

    title: str
    tensor: str
    way_out: str = ""


OTHERS = (
    Other("a LoRA", r".*[._]lora_?[._]?(A|B|up|down)\b.*|.*\.(hada_w1_a|lokr_w[12](_a)?|diff_b)", "choose it in Outrigger LoRA"),
    Other("an IP-Adapter", r".*(ip_adapter|_ip)\b.*|.*ip_adapter_.*"),
    Other("a ControlNet", r"(control_model|controlnet_\w+|control_\w*(layers|blocks)|input_hint_block)\..*"),
    Other("a style model (Redux)", r"redux_up\.weight"),
    Other("Stable Diffusion 1, 2 or XL", r"(input_blocks\.0\.0|down_blocks\.0)\..*", "choose its Diffusers folder"),
    Other("Stable Cascade", r"clf\.1\.weight"),
    Other("Stable Audio", r"(model\.)?(transformer\.)?rotary_pos_emb\.inv_freq"),
    Other("ACE-Step", r"genre_embedder\.weight|encoder\.lyric_encoder\..*"),
    Other("AuraFlow", r"double_layers\.0\..*|joint_transformer_blocks\.0\.ff_context\..*"),
    Other("Hunyuan DiT", r"mlp_t5\.0\.weight|text_embedding_padding"),
    Other("Hunyuan3D", r"latent_in\.weight"),
    Other("PixArt", r"t_block\.1\.weight|adaln_single\.emb\.(aspect_ratio|resolution)_embedder\..*"),
    Other("HiDream", r"caption_projection\.0\.linear\.weight|double_stream_blocks\.0\..*"),
    Other("Cosmos", r"blocks\.block0\..*|blocks\.0\.mlp\.layer1\.weight|transformer_blocks\.0\.norm1\.linear_1\.weight"),
    Other("Mochi", r"t5_yproj\.weight|time_embed\.pooler\..*"),
    Other("CogVideoX or CogView", r"blocks\.0\.norm1\.linear\.weight|patch_embed\.text_proj\.weight"),
    Other("Kandinsky 5", r"visual_transformer_blocks\.0\..*"),
    Other("OmniGen", r"llm\.layers\.0\..*|layers\.0\.self_attn\.qkv_proj\.weight"),
    Other("a VAE", r"((first_stage_model|vae|taesd)\.)?(encoder|decoder)\.(conv_in|conv1|conv_out|conv_norm_out|layers\.\d+|\d+)\.(weight|bias|conv\..*)", "choose it as vae"),
    Other(
        "a text encoder",
        r"(.*\.)?(shared|embed_tokens|embeddings\.token_embedding|token_embd|token_embedding)\.weight",
        "choose it as text_encoder, or load it with ComfyUI's CLIP loaders",
    ),
    Other("a CLIP vision model", r"(vision_model|visual)\..*", "load it with ComfyUI's Load CLIP Vision"),
)  # fmt: skip
"""Looked through in this order: a part of a checkpoint comes behind the model that it may be a part of."""


def what_else(names: Iterable[str]) -> Other | None:
    """What a file with tensors of these names is; None where that is not known."""
    bare = [name.removeprefix(next(filter(name.startswith, PREFIXES), "")) for name in names]
    return next((other for other in OTHERS if any(re.fullmatch(other.tensor, name) for name in bare)), None)
