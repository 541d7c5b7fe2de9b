"""The sidecar: the process that owns the devices and runs diffusion transformers over one or many of them."""

__version__ = "0.1.0"
