"""Chroma (lodestones 2025, huggingface.co/lodestones/Chroma): Flux.1 schnell with one network for all modulations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .cuts import LinearShard, TensorSplit
from .flux import DOUBLE, EMBEDDERS, FLUX, SINGLE
from .spec import FamilySpec
from .texts import BARE_T5
from .written import Rebuilt, Shapes, Variant, count_blocks

RENAMES = (
    (r"^(distilled_guidance_layer\.layers\.\d+)\.in_layer\.", r"\1.linear_1."),
    (r"^(distilled_guidance_layer\.layers\.\d+)\.out_layer\.", r"\1.linear_2."),
    (r"^(distilled_guidance_layer\.norms\.\d+)\.scale$", r"\1.weight"),
    *FLUX.renames,
)


def config_from(shapes: Shapes) -> dict[str, Any]:
    """The arguments of the class that give tensors of these shapes."""
    width, in_channels = shapes["x_embedder.weight"]
    [head_dim] = shapes["transformer_blocks.0.attn.norm_q.weight"]
    hidden, channels = shapes["distilled_guidance_layer.in_proj.weight"]
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count_blocks(shapes, "transformer_blocks"),
        "num_single_layers": count_blocks(shapes, "single_transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "axes_dims_rope": (head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
        "approximator_num_channels": channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": count_blocks(shapes, r"distilled_guidance_layer\.layers"),
    }


def unsupported_config(config: Mapping[str, Any]) -> str:
    """What a configuration is when it is not Chroma; empty when it is."""
    channels = config.get("in_channels", 64), config.get("out_channels") or config.get("in_channels", 64)
    return "" if channels == (64, 64) else "a Chroma of {} input and {} output channels".format(*channels)


def _modulations(config: Mapping[str, Any]) -> int:
    """Shift, scale and gate: one of each for a single block, four for a double block, and a shift and a scale at the end."""
    return 3 * config["num_single_layers"] + 12 * config["num_layers"] + 2


TINY = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "axes_dims_rope": (4, 14, 14),
        "approximator_num_channels": 64,
        "approximator_hidden_dim": 96,
        "approximator_layers": 2,
    }
)
"""For tests: 4 heads of 32, 2 double and 2 single blocks."""

CHROMA: FamilySpec = replace(
    FLUX,
    name="chroma",
    title="Chroma",
    pipeline_classes=("ChromaPipeline",),
    transformer_class="ChromaTransformer2DModel",
    nunchaku_file=None,
    signature=(
        "x_embedder.weight",
        "context_embedder.weight",
        "distilled_guidance_layer.in_proj.weight",
        "transformer_blocks.0.attn.add_q_proj.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "single_transformer_blocks.0.proj_mlp.weight",
        "proj_out.weight",
    ),
    variants=(Variant("Chroma Radiance", "nerf_blocks.0.norm.scale"),),
    renames=RENAMES,
    config_from=config_from,
    unsupported_config=unsupported_config,
    tensor=TensorSplit(
        linears=(
            *(shard for shard in FLUX.tensor.linears if shard.mode != "gather" and shard not in EMBEDDERS),
            LinearShard(r"distilled_guidance_layer\.layers\.\d+\.linear_1", "column"),
            LinearShard(r"distilled_guidance_layer\.layers\.\d+\.linear_2", "row"),
        ),
        attentions=rf"({DOUBLE}|{SINGLE})\.attn",
    ),
    inputs=tuple(each for each in FLUX.inputs if each[1] not in ("pooled", "guidance")),
    rebuilt=(
        Rebuilt(
            "time_text_embed",
            (("num_channels", lambda config: config["approximator_num_channels"] // 4), ("out_dim", _modulations)),
        ),
    ),
    shift=math.exp(1.15),
    tiny=TINY,
    pooled_width="",
    references=(),
    refuses=(("guidance", "Chroma is run with a distilled guidance of 0 alone: remove FluxGuidance"),),
    text_encoders="T5: use a CLIP Loader (type chroma) and CLIP Text Encode",
    texts=BARE_T5,
)
