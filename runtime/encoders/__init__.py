"""Text encoders and autoencoders: the classes of transformers and diffusers, on the first rank alone."""
