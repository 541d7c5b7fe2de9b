"""Text encoders and autoencoders: the classes of transformers and diffusers, on one rank or over several."""
