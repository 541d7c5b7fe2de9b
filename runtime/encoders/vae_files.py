"""Autoencoders from their files: a diffusers folder, or a single file in ComfyUI's names."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..configuration import building, load_folder
from ..errors import Refused
from ..families.spec import FamilySpec
from ..file_names import SAFETENSORS, check_file_name
from ..finite import Weights, first_not_finite
from ..json_file import read_json
from ..safetensors_header import read_header
from ..weight_files import DIFFUSERS, twice
from ..weight_formats import check_formats
from .vae_names import VaeFile, vae_file_of, vae_part

LATENT_IN = "decoder.conv_in.weight"
"""The first layer that a latent goes through."""
COLOURS_OUT = "decoder.conv_out.weight"
"""The last layer."""
COUNTED = "num_batches_tracked"
"""What training alone reads of a batch norm; files may lack it."""


def load_autoencoder(path: Path, family: FamilySpec) -> nn.Module:
    """The VAE of a family, in float32 on the CPU. Raises `Refused` when the path holds something else."""
    check_autoencoder(path, family)
    model = _from_folder(path, family) if path.is_dir() else _from_file(path, vae_file_of(family))
    if name := first_not_finite(Weights(str(path), model)):
        raise Refused(
            f"{path}: {name} has numbers that are not finite (nan or inf): the file is damaged, download it again"
        )
    return model


def check_autoencoder(path: Path, family: FamilySpec) -> None:
    """Raise `Refused` when what is at a path is no VAE of a family, by its configuration or names alone."""
    if not family.vae_class:
        raise Refused(f"the VAE of {family.title} is not available yet: use a VAE Loader with VAE Decode or VAE Encode")
    if path.is_dir():
        config = read_json(path / "config.json")
        kind = config.get("_class_name")
        if kind != family.vae_class:
            raise Refused(f"{path} holds a VAE of another kind ({kind}): {family.title} needs an {family.vae_class}")
        _check_channels(config.get("latent_channels", config.get("z_dim")), path, family)
    elif (layout := vae_file_of(family)) is None:
        raise Refused(
            f"{path} is a single file, and for {family.title} a diffusers folder is needed: choose one, or use a VAE Loader "
            f"and VAE Decode"
        )
    else:
        check_file_name(path, SAFETENSORS)
        header, names = read_header(path), _stored_names(path, layout)
        stored = names.get(LATENT_IN)
        _check_channels(header[stored].shape[1] if stored else None, path, family)
        drawn = header[names[COLOURS_OUT]].shape[0] if COLOURS_OUT in names else layout.colours
        if drawn != layout.colours:
            raise Refused(
                f"{path} draws {drawn} numbers for a place, but the {layout.title} {layout.colours}: use a VAE Loader with VAE "
                f"Decode or VAE Encode instead"
            )


def _check_channels(channels: int | None, path: Path, family: FamilySpec) -> None:
    """Raise `Refused` for latents of other channels than the family's, where the number is told."""
    needed = family.latent.channels // family.latent.shuffle**2
    if channels not in (needed, None):
        raise Refused(
            f"{path} is a VAE of {channels} channels, but the latents of {family.title} have {needed}: choose the VAE of this "
            f"model"
        )


def _from_folder(path: Path, family: FamilySpec) -> nn.Module:
    model_class = getattr(diffusers, family.vae_class)
    return load_folder(model_class, path, stem=DIFFUSERS, build=model_class.from_config, torch_dtype=torch.float32)


def _stored_names(path: Path, kind: VaeFile) -> dict[str, str]:
    """The names of a file's tensors by those of the class. Raises `Refused` for a file of another kind."""
    header = read_header(path)
    part = vae_part(header)
    beside = vae_part(name for name in header if name not in part.values())
    names = {name: part[stored] for name, stored in kind.renamed(part).items()}
    # of two names of one tensor the last stays in each
    others = {name: part[stored] for name, stored in kind.renamed(reversed(part)).items()}
    others |= {name: beside[stored] for name, stored in kind.renamed(beside).items()}
    for name in names:
        if names[name] != others[name]:
            raise twice(path, names[name], others[name], name)
    for needed in kind.signature:
        if needed not in names:
            raise Refused(f"{path} is no {kind.title} (it lacks {needed}): use a VAE Loader and VAE Decode instead")
    return names


def _from_file(path: Path, kind: VaeFile) -> nn.Module:
    header, names = read_header(path), _stored_names(path, kind)
    check_formats(path, {names[name]: header[names[name]].dtype for name in names if not name.endswith(COUNTED)})
    model_class = getattr(diffusers, kind.model_class)
    with building(model_class, where=path):
        model = model_class(**kind.config_from({name: header[stored].shape for name, stored in names.items()}))
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: _fitted(file.get_tensor(stored), shapes.get(name)) for name, stored in names.items()}
        tensors |= {name: torch.tensor(0) for name in shapes.keys() - tensors.keys() if name.endswith(COUNTED)}
        model.load_state_dict(tensors, assign=True)
    except (RuntimeError, SafetensorError) as error:
        raise Refused(f"{path} is no {kind.title}, or is damaged: {str(error)[:300]}") from error
    return model


def _fitted(tensor: torch.Tensor, shape: torch.Size | None) -> torch.Tensor:
    """In float32, and as a matrix where the file has one as a convolution of single pixels."""
    is_matrix = shape is not None and len(shape) == 2 and tensor.ndim == 4
    return (tensor.flatten(1) if is_matrix else tensor).float()
