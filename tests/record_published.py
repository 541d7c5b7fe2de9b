"""Record the names and shapes of published checkpoints: `COMFYUI_PATH=... python -m tests.record_published`.

Those of diffusers come from its classes with the published configurations, on the meta device; those of single files from
ComfyUI's own model classes, in a process of their own, where `nodes` is ComfyUI's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0,
    "num_heads": 24, "depth": 19, "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
FLUX2 = {
    **FLUX, "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 15360, "hidden_size": 6144,
    "mlp_ratio": 3.0, "num_heads": 48, "depth": 8, "depth_single_blocks": 48, "axes_dim": [32, 32, 32, 32], "theta": 2000,
    "patch_size": 1, "qkv_bias": False, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
}  # fmt: skip
CHROMA = {
    **{key: FLUX[key] for key in FLUX if key not in ("vec_in_dim", "guidance_embed")}, "in_channels": 64, "out_channels": 64,
    "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5,
}  # fmt: skip
QWEN = {
    "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
WAN = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40, "in_dim": 16, "out_dim": 16}
NEXT = {
    "patch_size": 2, "in_channels": 16, "qk_norm": True, "n_refiner_layers": 2, "rope_theta": 256.0, "axes_lens": [1536, 512, 512],
}  # fmt: skip
ZIMAGE = {
    **NEXT, "dim": 3840, "cap_feat_dim": 2560, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48],
    "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
}  # fmt: skip
LUMINA = {
    **NEXT, "dim": 2304, "cap_feat_dim": 2304, "n_layers": 26, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32],
    "ffn_dim_multiplier": 4.0, "rope_theta": 10000.0, "axes_lens": [300, 512, 512],
}  # fmt: skip
SMALL_WAN = {**WAN, "dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}
SD35 = {
    "input_size": None, "pos_embed_max_size": 192, "patch_size": 2, "in_channels": 16, "adm_in_channels": 2048, "depth": 38,
    "num_blocks": 38, "num_patches": 192**2, "qk_norm": "rms", "pos_embed_scaling_factor": None,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}},
}  # fmt: skip
SD3 = {
    **SD35, "depth": 24, "num_blocks": 24, "qk_norm": None,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
}  # fmt: skip
HUNYUAN15 = {
    "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "axes_dim": [16, 56, 56],
    "context_in_dim": 3584, "hidden_size": 2048, "mlp_ratio": 4.0, "num_heads": 16, "depth": 54, "depth_single_blocks": 0,
    "theta": 256, "qkv_bias": True, "byt5": True, "meanflow": False, "guidance_embed": False, "use_cond_type_embedding": True,
    "vision_in_dim": 1152,
}  # fmt: skip
HUNYUAN = {
    **HUNYUAN15, "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768, "context_in_dim": 4096,
    "hidden_size": 3072, "num_heads": 24, "depth": 20, "depth_single_blocks": 40, "byt5": False, "guidance_embed": True,
    "use_cond_type_embedding": False, "vision_in_dim": None,
}  # fmt: skip

MODEL = {
    "flux": ("comfy.ldm.flux.model", "Flux"),
    "chroma": ("comfy.ldm.chroma.model", "Chroma"),
    "qwen": ("comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel"),
    "wan": ("comfy.ldm.wan.model", "WanModel"),
    "next": ("comfy.ldm.lumina.model", "NextDiT"),
    "ltx": ("comfy.ldm.lightricks.model", "LTXVModel"),
    "sd3": ("comfy.ldm.modules.diffusionmodules.mmdit", "OpenAISignatureMMDITWrapper"),
    "hunyuan": ("comfy.ldm.hunyuan_video.model", "HunyuanVideo"),
}
ORIGINAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan 2.1 T2V 1.3B": ("wan", SMALL_WAN),
    "Wan 2.1 T2V 14B": ("wan", WAN),
    "Wan 2.2 T2V A14B, either expert": ("wan", WAN),
    "Wan 2.1 I2V 14B": ("wan", {**WAN, "in_dim": 36, "model_type": "i2v"}),
    "Wan 2.1 Fun InP 1.3B": ("wan", {**SMALL_WAN, "in_dim": 36, "model_type": "i2v"}),
    "Wan 2.1 FLF2V 14B": ("wan", {**WAN, "in_dim": 36, "model_type": "i2v", "flf_pos_embed_token_number": 514}),
    "Wan 2.2 I2V A14B, either expert": ("wan", {**WAN, "in_dim": 36}),
    "Wan 2.2 TI2V 5B": ("wan", {**WAN, "dim": 3072, "ffn_dim": 14336, "num_heads": 24, "num_layers": 30, "in_dim": 48, "out_dim": 48}),
    "Flux.1 dev": ("flux", FLUX),
    "Flux.1 Kontext dev": ("flux", FLUX),
    "Flux.1 Krea dev": ("flux", FLUX),
    "Flux.1 schnell": ("flux", {**FLUX, "guidance_embed": False}),
    "Flux.1 Fill dev": ("flux", {**FLUX, "in_channels": 96}),
    "Flux.1 Canny dev": ("flux", {**FLUX, "in_channels": 32}),
    "Flux.1 Depth dev": ("flux", {**FLUX, "in_channels": 32}),
    "Flux.1 lite 8B": ("flux", {**FLUX, "depth": 8}),
    "Flux.1 mini 3B": ("flux", {**FLUX, "depth": 5, "depth_single_blocks": 10}),
    "Qwen-Image": ("qwen", QWEN),
    "Qwen-Image 2512": ("qwen", QWEN),
    "Qwen-Image-Edit": ("qwen", QWEN),
    "Qwen-Image-Edit 2509": ("qwen", QWEN),
    "Qwen-Image-Edit 2511": ("qwen", QWEN),
    "Qwen-Image, pruned to 13B": ("qwen", {**QWEN, "num_layers": 40}),
    "Flux.2 dev": ("flux", FLUX2),
    "Flux.2 klein 4B": ("flux", {**FLUX2, "context_in_dim": 7680, "hidden_size": 3072, "num_heads": 24, "depth": 5,
                                 "depth_single_blocks": 20, "guidance_embed": False}),
    "Flux.2 klein 9B": ("flux", {**FLUX2, "context_in_dim": 12288, "hidden_size": 4096, "num_heads": 32, "depth": 8,
                                 "depth_single_blocks": 24, "guidance_embed": False}),
    "Chroma1": ("chroma", CHROMA),
    "Z-Image Turbo": ("next", ZIMAGE),
    "Lumina-Image 2.0": ("next", LUMINA),
    "LTX-Video 0.9, 2B": ("ltx", {"num_layers": 28, "attention_head_dim": 64, "cross_attention_dim": 2048}),
    "LTX-Video 0.9.7, 13B": ("ltx", {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}),
    "Stable Diffusion 3 medium": ("sd3", SD3),
    "Stable Diffusion 3.5 medium": ("sd3", {
        **SD3, "qk_norm": "rms", "pos_embed_max_size": 384, "num_patches": 384**2, "x_block_self_attn_layers": list(range(13))}),
    "Stable Diffusion 3.5 large": ("sd3", SD35),
    "HunyuanVideo 1.5 T2V 480p": ("hunyuan", HUNYUAN15),
    "HunyuanVideo 1.5 I2V 480p": ("hunyuan", HUNYUAN15),
    "HunyuanVideo 1.5 T2V 720p": ("hunyuan", HUNYUAN15),
    "HunyuanVideo 1.5 I2V 720p": ("hunyuan", HUNYUAN15),
    "HunyuanVideo 1.5 T2V 480p, in the authors' names": ("hunyuan", HUNYUAN15),
    "HunyuanVideo": ("hunyuan", HUNYUAN),
    "HunyuanVideo 1.5 I2V 480p, step-distilled": ("hunyuan", {**HUNYUAN15, "meanflow": True}),
    "HunyuanVideo 1.5 super resolution 720p": ("hunyuan", {**HUNYUAN15, "in_channels": 98}),
}  # fmt: skip
"""Class and arguments in ComfyUI, by checkpoint."""
MARKED = {"Qwen-Image-Edit 2511": {"__index_timestep_zero__": (0,)}}
"""What their files have beside: 2511 says so that its references have no noise."""
WITH_VAE = {"Stable Diffusion 3 medium, with its VAE": ("Stable Diffusion 3 medium", "ae")}
"""All in one file, under the prefixes of the first Stable Diffusion."""
AUTHORS_NAMES = (
    (r"mlp\.0\.", "mlp.fc1."),
    (r"mlp\.2\.", "mlp.fc2."),
    (r"time_in\.in_layer\.", "time_in.mlp.0."),
    (r"time_in\.out_layer\.", "time_in.mlp.2."),
    (r"t_embedder\.in_layer\.", "t_embedder.mlp.0."),
    (r"t_embedder\.out_layer\.", "t_embedder.mlp.2."),
    (r"c_embedder\.in_layer\.", "c_embedder.linear_1."),
    (r"c_embedder\.out_layer\.", "c_embedder.linear_2."),
    (r"(self|img|txt)_attn\.(qkv|proj)\.", r"\1_attn_\2."),
    (r"(img|txt)_attn\.norm\.(q|k)\w+_norm\.\w+$", r"\1_attn_\2_norm.weight"),
    (r"(img|txt)_mod\.lin\.", r"\1_mod.linear."),
)
"""From ComfyUI's names of HunyuanVideo 1.5 to Tencent's own, as diffusers' script that converts them has those."""
DISTRIBUTION = {"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"}
PICTURES = {
    "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
LAYERS, AUTOENCODER = "comfy.ldm.modules.diffusionmodules.model", "comfy.ldm.models.autoencoder"
VAES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ae": (AUTOENCODER, "AutoencodingEngine", {
        "regularizer_config": DISTRIBUTION,
        "encoder_config": {"target": f"{LAYERS}.Encoder", "params": PICTURES},
        "decoder_config": {"target": f"{LAYERS}.Decoder", "params": PICTURES}}),
    "wan_2.1_vae": ("comfy.ldm.wan.vae", "WanVAE", {
        "dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
        "temperal_downsample": [False, True, True], "dropout": 0.0}),
    "wan2.2_vae": ("comfy.ldm.wan.vae2_2", "WanVAE", {
        "dim": 160, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
        "temperal_downsample": [False, True, True], "dropout": 0.0}),
    "flux2-vae": (AUTOENCODER, "AutoencoderKL", {
        "embed_dim": 32, "ddconfig": {**PICTURES, "z_channels": 32, "batch_norm_latent": True}}),
}  # fmt: skip


def main() -> None:
    """Write both layouts."""
    import diffusers

    from tests.published_keys import write_keys
    from tests.test_published import PUBLISHED, REFUSED

    with torch.device("meta"):
        models = {
            name: getattr(diffusers, model_class)(**config)
            for name, (_, model_class, config) in {**PUBLISHED, **REFUSED}.items()
        }
    write_keys("diffusers", {name: shapes_of(model) for name, model in models.items()})
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["COMFYUI_PATH"], str(here)])}
    code = "import comfy.options; comfy.options.enable_args_parsing(); import record_published as r; r.print_original()"
    command = [sys.executable, "-c", code, "--cpu"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    original = json.loads(done.stdout.splitlines()[-1])
    original |= {name: whole_file(*map(original.get, parts)) for name, parts in WITH_VAE.items()}
    write_keys("original", {name: original[name] for name in models if name in original})
    write_keys("vae", {name: original[name] for name in VAES})


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of it has."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def whole_file(transformer: Shapes, vae: Shapes) -> Shapes:
    """Both in one."""
    prefixed = (("model.diffusion_model.", transformer), ("first_stage_model.", vae))
    return {f"{prefix}{name}": shape for prefix, shapes in prefixed for name, shape in shapes.items()}


def in_authors_names(shapes: Shapes) -> Shapes:
    """HunyuanVideo 1.5 as its authors name it: query, key and value of a block are three."""
    named: Shapes = {}
    for name, (rows, *others) in shapes.items():
        for pattern, replacement in AUTHORS_NAMES:
            name = re.sub(pattern, replacement, name)
        if re.search(r"(img|txt)_attn_qkv", name):
            named |= {name.replace("_qkv", f"_{each}"): (rows // 3, *others) for each in "qkv"}
        else:
            named[name] = (rows, *others)
    return named


def print_original() -> None:
    """What ComfyUI's classes have."""
    ops = import_module("comfy.ops").disable_weight_init
    found = {}
    for name, (kind, arguments) in ORIGINAL.items():
        module, model_class = MODEL[kind]
        model = getattr(import_module(module), model_class)(
            **arguments, device="meta", dtype=torch.bfloat16, operations=ops
        )
        found[name] = {**shapes_of(model), **MARKED.get(name, {})}
        if name.endswith("in the authors' names"):
            found[name] = in_authors_names(found[name])
    with torch.device("meta"):
        found |= {
            name: shapes_of(getattr(import_module(module), model_class)(**arguments))
            for name, (module, model_class, arguments) in VAES.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
