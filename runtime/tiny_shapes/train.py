"""Make the model: `python -m runtime.tiny_shapes.train --out DIR --minutes N --stage all|vae|transformer`.

The working states (weights only) and the finished diffusers folder `model` are written to DIR. The stage
`transformer` takes the autoencoder that an earlier run left there, and with `--resume` the transformer too.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from .autoencoder import build_autoencoder
from .autoencoder_training import refine_decoder, refine_time, train_autoencoder
from .dataset import make_clips, make_pictures
from .denoiser import LEARNING_RATE, RESUMED_RATE, PromptCache, build_transformer, train_transformer
from .sampling import SHIFT
from .text import build_text_encoder, build_tokenizer

AUTOENCODER, TRANSFORMER = "autoencoder.pt", "transformer.pt"
AUTOENCODER_SHARE = 0.3
PICTURES, CLIPS = 3000, 200


def save_folder(folder: Path, autoencoder: AutoencoderKLWan, transformer: WanTransformer3DModel) -> None:
    """Write the diffusers folder in bfloat16."""
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=build_text_encoder(),
        vae=autoencoder,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )
    for module in (pipeline.text_encoder, autoencoder, transformer):
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    _name_tokenizer_plainly(folder)


def _name_tokenizer_plainly(folder: Path) -> None:
    """Write the tokenizer's class under the name that transformers 4 and 5 both know."""
    for path in (folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"):
        path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def load_state(path: Path, module: torch.nn.Module) -> torch.nn.Module:
    """Fill a module from a working state."""
    module.load_state_dict(torch.load(path, weights_only=True))
    return module


def main() -> None:
    """Train the stages asked for and write the folder."""
    parser = argparse.ArgumentParser(description="Train the tiny model from drawn scenes.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=90.0, help="of training, all stages together")
    parser.add_argument("--stage", choices=("all", "vae", "transformer"), default="all")
    parser.add_argument("--resume", action="store_true", help="train the transformer of an earlier run further")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    report = partial(print, flush=True)
    minutes = {"vae": options.minutes, "transformer": options.minutes}
    if options.stage == "all":
        minutes["vae"] = options.minutes * AUTOENCODER_SHARE
        minutes["transformer"] = options.minutes - minutes["vae"]
    if options.stage in ("all", "vae"):
        trained = train_autoencoder(options.out / AUTOENCODER, minutes["vae"] * 0.5, report)
        refine_time(trained, options.out / AUTOENCODER, minutes["vae"] * 0.25, report)
        refine_decoder(trained, options.out / AUTOENCODER, minutes["vae"] * 0.25, report)
    autoencoder = load_state(options.out / AUTOENCODER, build_autoencoder())
    if options.stage in ("all", "transformer"):
        report(f"encoding {PICTURES} pictures and {CLIPS} clips")
        pictures, clips = make_pictures(autoencoder, PICTURES), make_clips(autoencoder, CLIPS)
        prompts = PromptCache(build_tokenizer(), build_text_encoder())
        checkpoint, transformer = options.out / TRANSFORMER, build_transformer()
        peak = RESUMED_RATE if options.resume else LEARNING_RATE
        if options.resume:
            load_state(checkpoint, transformer)
        transformer = train_transformer(
            transformer, pictures, clips, prompts, checkpoint, minutes["transformer"], report, peak
        )
        save_folder(options.out / "model", autoencoder, transformer)


if __name__ == "__main__":
    main()
