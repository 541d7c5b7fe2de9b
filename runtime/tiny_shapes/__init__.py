"""A tiny text-to-picture and text-to-video model in Wan's layout, small enough to ship, and how it was made.

It draws one coloured shape on a plain background. Its folder is an ordinary diffusers one, so everything that loads
Wan loads it; it exists so that commands, tests and template graphs have a trained model on a machine without one.
"""

from pathlib import Path

MODEL_FOLDER: Path = Path(__file__).resolve().parent / "model"
"""The diffusers folder: transformer, vae, text_encoder, tokenizer, scheduler."""
