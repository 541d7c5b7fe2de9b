"""Pipelines of diffusers with tiny parts and random weights, by name: architectures that no family describes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    GemmaConfig,
    GemmaModel,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from runtime.tiny_shapes import MODEL_FOLDER

WIDTH, WORDS = 32, 30
"""Of a token, and in the vocabulary."""


def tokenizer(length: int = 0) -> Any:
    """That of tiny-shapes; it fills prompts up to this length where a pipeline leaves that to it."""
    made = AutoTokenizer.from_pretrained(MODEL_FOLDER / "tokenizer")
    made.model_max_length = length or made.model_max_length
    return made


def t5() -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def umt5() -> UMT5EncoderModel:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return UMT5EncoderModel(UMT5Config(vocab_size=WORDS, feed_forward_proj="gated-gelu", **sizes))


def decoder(model: Callable, config: Callable, **others: Any) -> Any:
    """A language model of one of transformers' classes."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return model(config(vocab_size=WORDS, num_key_value_heads=2, head_dim=16, **sizes, **others))


def clip(model: Callable = CLIPTextModel) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return model(CLIPTextConfig(vocab_size=WORDS, projection_dim=WIDTH, bos_token_id=0, eos_token_id=1, **sizes))


def kl(stages: int = 4) -> diffusers.AutoencoderKL:
    """Of pictures; each stage but the first halves their sides."""
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * stages, "up_block_types": ("UpDecoderBlock2D",) * stages}
    return diffusers.AutoencoderKL(block_out_channels=(8,) * stages, norm_num_groups=4, layers_per_block=1, **kinds)


def unet(width: int = WIDTH, **others: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, sample_size=8, cross_attention_dim=width, norm_num_groups=4,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **others,
    )  # fmt: skip


def aura_flow() -> diffusers.AuraFlowPipeline:
    return diffusers.AuraFlowPipeline(
        tokenizer=tokenizer(), text_encoder=umt5(), vae=kl(), scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, caption_projection_dim=32, pos_embed_max_size=64,
        ),
    )  # fmt: skip


def cog_video() -> diffusers.CogVideoXPipeline:
    stages = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer(), text_encoder=t5(), scheduler=diffusers.CogVideoXDDIMScheduler(),
        vae=diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2, **stages
        ),
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2,
            text_embed_dim=WIDTH, num_layers=1, sample_width=6, sample_height=8, sample_frames=9,
        ),
    )  # fmt: skip


def of_pixart(kind: Callable, model: Callable, **others: Any) -> Any:
    transformer = model(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=2, caption_channels=WIDTH,
        in_channels=4, cross_attention_dim=16, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6, **others,
    )  # fmt: skip
    return kind(tokenizer=tokenizer(), text_encoder=t5(), vae=kl(), scheduler=DDIMScheduler(), transformer=transformer)


def sana() -> diffusers.SanaPipeline:
    stages = {f"{side}_block_types": ("ResBlock", "EfficientViTBlock") for side in ("encoder", "decoder")}
    widths = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
    scales = {f"{side}_qkv_multiscales": ((), (5,)) for side in ("encoder", "decoder")}
    layers = {f"{side}_layers_per_block": (1, 1) for side in ("encoder", "decoder")}
    return diffusers.SanaPipeline(
        tokenizer=tokenizer(), text_encoder=decoder(Gemma2Model, Gemma2Config),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=2, downsample_block_type="conv", upsample_block_type="interpolate",
            decoder_norm_types="rms_norm", decoder_act_fns="silu", **stages, **widths, **scales, **layers,
        ),
        transformer=diffusers.SanaTransformer2DModel(
            patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
            num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=WIDTH,
            sample_size=8,
        ),
    )  # fmt: skip


def cog_view4() -> diffusers.CogView4Pipeline:
    return diffusers.CogView4Pipeline(
        tokenizer=tokenizer(), text_encoder=decoder(GlmModel, GlmConfig, pad_token_id=0), vae=kl(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
        ),
        transformer=diffusers.CogView4Transformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4, rope_axes_dim=(16, 16),
        ),
    )  # fmt: skip


def cog_view3() -> diffusers.CogView3PlusPipeline:
    return diffusers.CogView3PlusPipeline(
        tokenizer=tokenizer(), text_encoder=t5(), vae=kl(), scheduler=diffusers.CogVideoXDDIMScheduler(),
        transformer=diffusers.CogView3PlusTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8, sample_size=8,
        ),
    )  # fmt: skip


def hunyuan_dit() -> diffusers.HunyuanDiTPipeline:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return diffusers.HunyuanDiTPipeline(
        tokenizer=tokenizer(), text_encoder=BertModel(BertConfig(vocab_size=WORDS, **sizes)), tokenizer_2=tokenizer(),
        text_encoder_2=t5(), vae=kl(), scheduler=diffusers.DDPMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
        transformer=diffusers.HunyuanDiT2DModel(
            sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
            cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH, pooled_projection_dim=16, hidden_size=16,
            activation_fn="gelu-approximate", text_len=77, text_len_t5=256,
        ),
    )  # fmt: skip


def hunyuan_video() -> diffusers.HunyuanVideoPipeline:
    stages = {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4, "up_block_types": ("HunyuanVideoUpBlock3D",) * 4}
    return diffusers.HunyuanVideoPipeline(
        tokenizer=tokenizer(), text_encoder=decoder(LlamaModel, LlamaConfig, pad_token_id=0), tokenizer_2=tokenizer(),
        text_encoder_2=clip(), scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4, **stages
        ),
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
            num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH, rope_axes_dim=(2, 4, 4),
        ),
    )  # fmt: skip


def allegro() -> diffusers.AllegroPipeline:
    stages = {"down_block_types": ("AllegroDownBlock3D",) * 4, "up_block_types": ("AllegroUpBlock3D",) * 4}
    return diffusers.AllegroPipeline(
        tokenizer=tokenizer(), text_encoder=t5(), scheduler=DDIMScheduler(),
        vae=diffusers.AutoencoderKLAllegro(
            block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_size=160, **stages
        ),
        transformer=diffusers.AllegroTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=1,
            cross_attention_dim=24, sample_width=8, sample_height=8, sample_frames=8, caption_channels=WIDTH,
        ),
    )  # fmt: skip


def mochi() -> diffusers.MochiPipeline:
    widths = {f"{side}_block_out_channels": (32,) * 4 for side in ("encoder", "decoder")}
    return diffusers.MochiPipeline(
        tokenizer=tokenizer(), text_encoder=t5(), scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLMochi(latent_channels=12, layers_per_block=(1,) * 5, **widths),
        transformer=diffusers.MochiTransformer3DModel(
            patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=1, pooled_projection_dim=16,
            in_channels=12, text_embed_dim=WIDTH, time_embed_dim=4, max_sequence_length=16,
        ),
    )  # fmt: skip


def lumina() -> diffusers.LuminaPipeline:
    return diffusers.LuminaPipeline(
        tokenizer=tokenizer(), text_encoder=decoder(GemmaModel, GemmaConfig), vae=kl(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=diffusers.LuminaNextDiT2DModel(
            sample_size=8, patch_size=2, in_channels=4, hidden_size=16, num_layers=1, num_attention_heads=2,
            num_kv_heads=1, multiple_of=16, ffn_dim_multiplier=None, norm_eps=1e-5, learn_sigma=True, qk_norm=True,
            cross_attention_dim=WIDTH, scaling_factor=1.0,
        ),
    )  # fmt: skip


def stable_diffusion() -> diffusers.StableDiffusionPipeline:
    return diffusers.StableDiffusionPipeline(
        tokenizer=tokenizer(77), text_encoder=clip(), vae=kl(), unet=unet(), scheduler=DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl() -> diffusers.StableDiffusionXLPipeline:
    conditions = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    numbers = 6 * conditions["addition_time_embed_dim"] + WIDTH
    return diffusers.StableDiffusionXLPipeline(
        tokenizer=tokenizer(77), text_encoder=clip(), tokenizer_2=tokenizer(77), vae=kl(), scheduler=DDIMScheduler(),
        text_encoder_2=clip(CLIPTextModelWithProjection), add_watermarker=False,
        unet=unet(2 * WIDTH, projection_class_embeddings_input_dim=numbers, **conditions),
    )  # fmt: skip


def wan_vae() -> diffusers.AutoencoderKLWan:
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def sky_reels() -> diffusers.SkyReelsV2Pipeline:
    return diffusers.SkyReelsV2Pipeline(
        tokenizer=tokenizer(), text_encoder=umt5(), vae=wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True, prediction_type="flow_prediction"),
        transformer=diffusers.SkyReelsV2Transformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, text_dim=WIDTH, freq_dim=256, ffn_dim=32,
            num_layers=1, rope_max_seq_len=32,
        ),
    )  # fmt: skip


def sana_video() -> diffusers.SanaVideoPipeline:
    return diffusers.SanaVideoPipeline(
        tokenizer=tokenizer(), text_encoder=decoder(Gemma2Model, Gemma2Config), vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=diffusers.SanaVideoTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, num_layers=1, num_cross_attention_heads=2,
            cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=WIDTH, sample_size=8,
        ),
    )  # fmt: skip


def bria() -> diffusers.BriaPipeline:
    return diffusers.BriaPipeline(
        tokenizer=tokenizer(), text_encoder=t5(), vae=kl(), scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=diffusers.BriaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=WIDTH, axes_dims_rope=[0, 4, 4],
        ),
    )  # fmt: skip


def latent_consistency() -> diffusers.LatentConsistencyModelPipeline:
    return diffusers.LatentConsistencyModelPipeline(
        tokenizer=tokenizer(77), text_encoder=clip(), vae=kl(), unet=unet(time_cond_proj_dim=8), safety_checker=None,
        scheduler=diffusers.LCMScheduler(), feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def text_to_video() -> diffusers.TextToVideoSDPipeline:
    return diffusers.TextToVideoSDPipeline(
        tokenizer=tokenizer(77), text_encoder=clip(), vae=kl(), scheduler=DDIMScheduler(),
        unet=diffusers.UNet3DConditionModel(
            block_out_channels=(8, 8), layers_per_block=1, sample_size=8, cross_attention_dim=WIDTH, norm_num_groups=4,
            attention_head_dim=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
    )  # fmt: skip


PIPELINES: dict[str, Callable[[], Any]] = {
    "AuraFlow": aura_flow,
    "CogVideoX": cog_video,
    "PixArtSigma": partial(of_pixart, diffusers.PixArtSigmaPipeline, diffusers.PixArtTransformer2DModel),
    "PixArtAlpha": partial(of_pixart, diffusers.PixArtAlphaPipeline, diffusers.PixArtTransformer2DModel),
    "Latte": partial(of_pixart, diffusers.LattePipeline, diffusers.LatteTransformer3DModel, video_length=3),
    "Sana": sana,
    "CogView4": cog_view4,
    "CogView3Plus": cog_view3,
    "HunyuanDiT": hunyuan_dit,
    "HunyuanVideo": hunyuan_video,
    "Allegro": allegro,
    "Mochi": mochi,
    "Lumina": lumina,
    "SkyReelsV2": sky_reels,
    "SanaVideo": sana_video,
    "Bria": bria,
    "LatentConsistencyModel": latent_consistency,
    "TextToVideoSD": text_to_video,
    "StableDiffusion": stable_diffusion,
    "StableDiffusionXL": stable_diffusion_xl,
}


def made(name: str) -> Any:
    """The pipeline of this name, with the same weights each time."""
    torch.manual_seed(0)
    return PIPELINES[name]()
