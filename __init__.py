"""Outrigger for ComfyUI: diffusion transformers in a process of their own, over one device or several."""

if __package__:
    from .nodes import comfy_entrypoint

    WEB_DIRECTORY = "./nodes/web"
    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
